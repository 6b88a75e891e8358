"""The edge inside a training process: ``attach().publish(model, step=n)``."""

from pulsenet.local.client import PublishResult
from pulsenet.local.protocol import PublishStatus
from pulsenet.training.publisher import CopyProgress, Publisher, attach
from pulsenet.training.snapshot import collect_tensors, take_snapshot

__all__ = ["attach", "Publisher", "PublishResult", "PublishStatus", "CopyProgress", "collect_tensors", "take_snapshot"]
