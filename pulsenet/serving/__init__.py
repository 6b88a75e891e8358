"""The edge beside an engine: ``attach(engine).start()``.

Engines for models in this process are in :mod:`pulsenet.serving.in_process`, which needs torch; nothing here does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsenet.local.rollouts import Sample
    from pulsenet.serving.engine import Engine, EngineUpdate, FullUpdate, RecordsUpdate, apply_update
    from pulsenet.serving.files import FilesEngine
    from pulsenet.serving.sglang import SglangEngine
    from pulsenet.serving.sglang_live import SglangPatchEngine
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
    "SglangEngine",
    "SglangPatchEngine",
    "Sample",
]

_PLACES = {
    "attach": "subscriber",
    "Subscriber": "subscriber",
    "Engine": "engine",
    "EngineUpdate": "engine",
    "FullUpdate": "engine",
    "RecordsUpdate": "engine",
    "apply_update": "engine",
    "FilesEngine": "files",
    "SglangEngine": "sglang",
    "SglangPatchEngine": "sglang_live",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: vLLM loads this package in each of its processes, for one small module."""
    if name == "Sample":
        return import_module("pulsenet.local.rollouts").Sample
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
