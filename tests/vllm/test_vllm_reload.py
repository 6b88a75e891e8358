"""Versions that a real vLLM loads as a whole: bit by bit what was published, or refused because it packs otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attach_alone import make_experts
from safetensors.torch import load_file
from vllm_models import change_weights, make_model, save_checkpoint
from vllm_server import running_server
from vllm_versions import Published

from pulsenet.errors import StructureError
from pulsenet.ids import Version
from pulsenet.serving.engine import apply_update, read_back_update
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine
from pulsenet.serving.vllm.reload import ReloadEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_what_was_loaded_is_what_was_published(tmp_path: Path) -> None:
    model = make_model("llama", 1)
    checkpoint = save_checkpoint(model, tmp_path / "model")
    versions: list[Any] = []
    for number in range(3):
        if number:
            change_weights(model, number)
        versions.append(Published.take(model, Version(0, number)))
    times: list[UpdateTimes] = []
    with running_server(checkpoint, tmp_path / "engine.log") as server:
        control = HttpControl(server.url)
        engine = ReloadEngine(control, tmp_path / "node", checkpoint, on_times=times.append)
        with versions[1].as_full() as update:
            apply_update(engine, update)
        apply_update(engine, versions[2].records_from(versions[1]))
        read_back_update(engine)
        engine.read_back()
        assert (engine.version, control.label(), server.is_paused()) == (Version(0, 2), "0.2", False)
        print(f"\npaused {times[-1].pause_seconds:.2f} s")
        engine.close()
        # Attaching compares all weights with the files, and taking the version up writes nothing.
        patched = VllmEngine(control, tmp_path / "node", on_times=times.append)
        with versions[2].as_full() as update:
            apply_update(patched, update)
        assert (patched.version, times[-1].pause_seconds) == (Version(0, 2), 0.0)
        patched.close()


def test_experts_that_vllm_packs_otherwise_when_it_loads_them_again_are_refused(tmp_path: Path) -> None:
    """vLLM 0.32.0 on a CPU: without the rehearsal it would serve other weights under the new label."""
    checkpoint = save_checkpoint(make_experts(), tmp_path / "model")
    (file,) = checkpoint.glob("*.safetensors")
    version = Published.take(load_file(file), Version(0, 0))
    length = ("--max-model-len", "512")  # all that these experts know
    with running_server(checkpoint, tmp_path / "engine.log", *length) as server, version.as_full() as update:
        control = HttpControl(server.url)
        patched = VllmEngine(control, tmp_path / "node")
        with pytest.raises(StructureError, match="packs or computes them"):
            patched.stage(update)
        patched.close()
        engine = ReloadEngine(control, tmp_path / "node", checkpoint)
        with pytest.raises(StructureError, match="comes out with other bits"):
            engine.stage(update)
        assert (engine.version, server.is_paused()) == (None, True)
        assert control.label() != "0.0"
        engine.close()
