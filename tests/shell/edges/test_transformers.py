"""A real transformers model on both edges: names, ties and outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsenet.ids import Version
from pulsenet.local.protocol import UpdateKind
from pulsenet.serving.in_process import InProcessEngine
from pulsenet.serving.subscriber import attach_engine
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training.publisher import attach_publisher

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def make_llama(dtype: torch.dtype, *, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).to(dtype)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
def test_a_served_llama_gives_the_trainers_outputs_after_each_version(
    tied: bool, serve: Callable[[Path], None], node: Any, stage: Any, tmp_path: Path
) -> None:
    """A-NAME-1, A-APP-2: the trainer ties its weights, the engine may or may not."""
    serve(tmp_path)
    trained = make_llama(torch.float32, tied=True)
    served = make_llama(torch.bfloat16, tied=tied)
    addresses = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    engine = InProcessEngine(served)
    tokens = torch.arange(10).reshape(1, 10)
    outputs = []
    with attach_publisher(data_dir=tmp_path) as publisher, attach_engine(engine, data_dir=tmp_path) as subscriber:
        for number in range(1, 4):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
            publisher.publish(trained, step=number, wait=True)
            _, table, region = node.offers[-1]
            root = compute_region_root(table, region)
            node.staged.append(stage(UpdateKind.FULL, None, Version(0, number), root, table, region))
            assert subscriber.step() == Version(0, number)
            with engine.weights(), torch.no_grad():
                outputs.append(served(tokens).logits)
            reference = make_llama(torch.bfloat16, tied=True)
            reference.load_state_dict({name: value.to(torch.bfloat16) for name, value in trained.state_dict().items()})
            with torch.no_grad():
                assert torch.equal(outputs[-1], reference(tokens).logits)
    assert dict(table.aliases) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not torch.equal(outputs[0], outputs[1])
    assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == addresses
