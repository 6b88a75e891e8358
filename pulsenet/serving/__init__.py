"""The edge beside an engine: ``attach(engine).start()``.

Engines for models in this process are in :mod:`pulsenet.serving.in_process`, which needs torch; nothing here does.
"""

from pulsenet.local.rollouts import Sample
from pulsenet.serving.engine import Engine, EngineUpdate, FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.subscriber import Subscriber, attach

__all__ = [
    "attach",
    "Subscriber",
    "Engine",
    "EngineUpdate",
    "FullUpdate",
    "RecordsUpdate",
    "apply_update",
    "FilesEngine",
    "Sample",
]
