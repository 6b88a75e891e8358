"""The edge inside a training process: ``attach_publisher().publish(model, step=n)``, ``OuterOptimizer(...).step()``.

``join_rounds()`` makes the exchange of an ``OuterOptimizer`` between machines, ``join_mixing()`` the mixer of a
``GossipOptimizer``.
"""

from typing import TYPE_CHECKING, Any

from pulsenet.local.client import PublishResult
from pulsenet.local.protocol import PublishStatus
from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.daemon_exchange import DaemonExchange, join_rounds
from pulsenet.training.daemon_mixer import DaemonMixer, join_mixing
from pulsenet.training.exchange import Exchange, FinalRound, Outcome, Restoration, RoundResult
from pulsenet.training.gossip_optimizer import GossipOptimizer
from pulsenet.training.local_exchange import LocalExchange
from pulsenet.training.local_mixer import LocalMixing
from pulsenet.training.mixer import Mixer, MixingReport
from pulsenet.training.outer_optimizer import OuterOptimizer, RoundReport
from pulsenet.training.probe import Probe
from pulsenet.training.publisher import CopyProgress, Publisher, attach_publisher
from pulsenet.training.rollout_checks import LogprobCheck
from pulsenet.training.snapshot import collect_tensors, take_snapshot

if TYPE_CHECKING:
    from pulsenet.training.callback import OuterCallback
    from pulsenet.training.publish_callback import PublishCallback

__all__ = [
    "attach_publisher",
    "Publisher",
    "PublishResult",
    "PublishStatus",
    "CopyProgress",
    "LogprobCheck",
    "collect_tensors",
    "take_snapshot",
    "OuterOptimizer",
    "RoundReport",
    "join_rounds",
    "DaemonExchange",
    "OuterSettings",
    "Algorithm",
    "Exchange",
    "Outcome",
    "RoundResult",
    "FinalRound",
    "Restoration",
    "LocalExchange",
    "GossipOptimizer",
    "MixingReport",
    "join_mixing",
    "DaemonMixer",
    "MixingSettings",
    "MixingVariant",
    "Mixer",
    "LocalMixing",
    "Probe",
    "OuterCallback",
    "PublishCallback",
]


def __getattr__(name: str) -> Any:
    """Import the Trainer's callbacks when they are asked for: they need transformers, which the rest does without."""
    if name == "OuterCallback":
        from pulsenet.training.callback import OuterCallback

        return OuterCallback
    if name == "PublishCallback":
        from pulsenet.training.publish_callback import PublishCallback

        return PublishCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
