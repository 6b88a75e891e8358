"""The edge beside an engine: ``attach_engine(engine).start()``, and what an engine of one's own is made of.

Engines for models in this process are in :mod:`pulsenet.serving.in_process`, which needs torch; nothing here does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsenet.codec.changes import apply_changes
    from pulsenet.local.rollouts import Sample
    from pulsenet.serving.engine import (
        Engine,
        EngineUpdate,
        FullUpdate,
        RecordsUpdate,
        apply_update,
        check_base,
        check_records,
        check_root,
        require_staged,
    )
    from pulsenet.serving.files import FilesEngine
    from pulsenet.serving.sglang import SglangEngine
    from pulsenet.serving.sglang_live import SglangPatchEngine
    from pulsenet.serving.subscriber import Subscriber, attach_engine
    from pulsenet.tensors.digest import compute_region_root

__all__ = [
    "attach_engine",
    "Subscriber",
    "Engine",
    "EngineUpdate",
    "FullUpdate",
    "RecordsUpdate",
    "apply_update",
    "check_base",
    "check_records",
    "check_root",
    "require_staged",
    "apply_changes",
    "compute_region_root",
    "FilesEngine",
    "SglangEngine",
    "SglangPatchEngine",
    "Sample",
]

_PLACES = {
    **dict.fromkeys(("attach_engine", "Subscriber"), "serving.subscriber"),
    **dict.fromkeys(("Engine", "EngineUpdate", "FullUpdate", "RecordsUpdate", "apply_update"), "serving.engine"),
    **dict.fromkeys(("check_base", "check_records", "check_root", "require_staged"), "serving.engine"),
    "apply_changes": "codec.changes",
    "compute_region_root": "tensors.digest",
    "FilesEngine": "serving.files",
    "SglangEngine": "serving.sglang",
    "SglangPatchEngine": "serving.sglang_live",
    "Sample": "local.rollouts",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: vLLM loads this package in each of its processes, for one small module."""
    if name in _PLACES:
        return getattr(import_module(f"pulsenet.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
