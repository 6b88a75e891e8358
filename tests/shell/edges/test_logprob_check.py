"""The check of logprobs on real models: another arithmetic passes, weights that were rounded to save memory do not."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsenet.chain.records import RolloutBatch
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.protocol import SignedBatch
from pulsenet.local.rollouts import Sample, pack_rollouts
from pulsenet.training import LogprobCheck, attach_publisher
from pulsenet.wire.schema import encode_value
from pulsenetd.demo.models import MODEL_PACKAGE, copy_module, load_masters
from pulsenetd.demo.rollouts import Sampler
from pulsenetd.demo.task import draw_questions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

Serve = Callable[[Path], None]
HONEST, CHEAP = PeerId(b"h" * 32), PeerId(b"c" * 32)
VERSION = Version(0, 3)
BITS = 3


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The FP32 masters of a trainer and their tokenizer."""
    # Its package is data: importing it would want llama.cpp.
    if request.param == "smollm2" and importlib.util.find_spec(MODEL_PACKAGE) is None:
        pytest.skip(f"{MODEL_PACKAGE} is not installed; make install installs it")
    return load_masters(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def round_weights(model: Any) -> Any:
    """What an engine serves that keeps each matrix row as a scale and integers of a few bits."""
    rounded = copy_module(model, torch.bfloat16)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.dim() == 2:
                rows = parameter.float()
                scales = rows.abs().amax(dim=1, keepdim=True) / (2 ** (BITS - 1) - 1)
                parameter.copy_((rows / scales).round() * scales)
    return rounded


def draw_batch(peer_id: PeerId, model: Any, tokenizer: Any) -> SignedBatch:
    """Sample from BF16 weights as the demo's inferencer does, with a cache, in padded groups."""
    sampler = Sampler(model, tokenizer, seed=1)
    sampler.refresh()
    questions = draw_questions(random.Random(0), count=2, operand_max=49)
    drawn = sampler.sample(questions, group_size=4, completion_tokens_max=8)
    rows = zip(drawn.prompts, drawn.completions, drawn.logprobs, drawn.rewards, strict=True)
    packed = pack_rollouts(VERSION, VERSION, [Sample(*row) for row in rows])
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    return SignedBatch(peer_id, 1, 0, encode_value(RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields)))


def test_rounded_weights_are_found_and_another_arithmetic_passes(
    loaded: tuple[Any, Any], serve: Serve, node: Any, tmp_path: Path
) -> None:
    masters, tokenizer = loaded
    published = copy_module(masters, torch.bfloat16)
    kept = {VERSION: copy_module(published, torch.float32)}

    @torch.no_grad()
    def compute(sample: Sample) -> Sequence[float] | None:
        """One plain pass in FP32 over the weights of that version, without a cache."""
        assert sample.version_first is not None
        if sample.version_first != sample.version_last or sample.version_first not in kept:
            return None
        prompt, completion = list(sample.prompt_tokens), list(sample.completion_tokens)
        logits = kept[sample.version_first](torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        values: list[float] = torch.log_softmax(logits, -1)[range(len(completion)), completion].tolist()
        return values

    serve(tmp_path)
    node.batches = [
        draw_batch(CHEAP, round_weights(published), tokenizer),
        draw_batch(HONEST, published, tokenizer),
    ]
    with attach_publisher(data_dir=tmp_path) as publisher:
        check = LogprobCheck(compute, share=1.0)
        assert [batch.peer_id for batch in publisher.rollouts(timeout_seconds=0.0, check=check)] == [HONEST]
    assert node.checks == [(CHEAP, 8, 8), (HONEST, 8, 0)]
