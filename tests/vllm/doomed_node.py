"""A node that dies in the middle of an update, at the request it is told:
``doomed_node.py URL DIRECTORY FAMILY SEED NUMBER PATH``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_models import change_weights, make_model
from vllm_versions import Published

from pulsenet.ids import Version
from pulsenet.serving.engine import apply_update
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.engine import VllmEngine


class DoomedControl(HttpControl):
    """Ends the process instead of sending one request."""

    doomed_path = ""

    def _call(self, method: str, path: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        if path.startswith(self.doomed_path):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._call(method, path, *arguments, **named)


def main() -> None:
    """Bring the engine to a version that differs from the one it holds, and die at the given request."""
    url, directory, family, seed, number, path = sys.argv[1:]
    control = DoomedControl(url)
    engine = VllmEngine(control, directory)
    engine.probe()
    model = make_model(family, int(seed))
    for step in range(1, int(number) + 1):
        change_weights(model, step)
    held = Published.take(model, Version(1, int(number)))
    assert engine.version == held.version, engine.version
    change_weights(model, 99)
    following = Published.take(model, Version(1, int(number) + 1))
    control.doomed_path = path
    apply_update(engine, following.records_from(held))


if __name__ == "__main__":
    main()
