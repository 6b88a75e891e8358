"""A model that vLLM packs is refused for patches and kept current by loads, on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from attach_alone import make_experts
from safetensors.torch import load_file, save_file
from vllm_models import change_tensors, save_checkpoint
from vllm_server import running_server
from vllm_versions import Published

from pulsenet.errors import StructureError
from pulsenet.ids import Version
from pulsenet.serving.engine import apply_update
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine
from pulsenet.serving.vllm.reload import ReloadEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

COMPILE_SECONDS_MAX = 900.0
"""vLLM compiles what experts are computed with at the first request."""
PROMPTS = [list(range(first, first + 40)) for first in range(0, 200, 40)]


def test_experts_follow_by_loads_and_answer_as_a_fresh_engine(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(make_experts(), tmp_path / "model")
    (file,) = checkpoint.glob("*.safetensors")
    state = load_file(file)
    versions = [Published.take(state, Version(0, 0))]
    for number in (1, 2):
        state = change_tensors(state, number)
        versions.append(Published.take(state, Version(0, number)))
    times: list[UpdateTimes] = []
    length = ("--max-model-len", "512")  # all that these experts know
    with running_server(checkpoint, tmp_path / "engine.log", *length) as server:
        server.generate(PROMPTS[0], 1, COMPILE_SECONDS_MAX)
        first = [server.generate(prompt, 16) for prompt in PROMPTS]
        control = HttpControl(server.url)
        patched = VllmEngine(control, tmp_path / "node")
        with versions[0].as_full() as update, pytest.raises(StructureError):
            patched.stage(update)
        patched.close()
        counts: list[tuple[int, int]] = []
        engine = ReloadEngine(
            control,
            tmp_path / "node",
            checkpoint,
            on_times=times.append,
            on_survey=lambda *found: counts.append(found),
        )
        with versions[1].as_full() as update:
            apply_update(engine, update)
        apply_update(engine, versions[2].records_from(versions[1]))
        engine.read_back()
        assert engine.version == Version(0, 2)
        assert server.ask("GET", "/weight_info") == {"weight_version": "0.2"}
        assert not server.is_paused()
        found = [server.generate(prompt, 16) for prompt in PROMPTS]
        engine.close()
    assert [answer.token_ids for answer in found] != [answer.token_ids for answer in first]
    save_file(state, file, {"format": "pt"})
    with running_server(checkpoint, tmp_path / "fresh.log", *length) as server:
        server.generate(PROMPTS[0], 1, COMPILE_SECONDS_MAX)
        expected = [server.generate(prompt, 16) for prompt in PROMPTS]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert [answer.logprobs for answer in found] == [answer.logprobs for answer in expected]
    ((compared_count, element_count),) = counts
    assert 0 < compared_count < element_count
    print(f"\npaused {times[-1].pause_seconds:.2f} s, {100 * compared_count / element_count:.0f} % compared")
