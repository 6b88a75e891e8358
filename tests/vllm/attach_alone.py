"""Starts an engine in this process, attaches its rank and prints the answer: ``attach_alone.py KIND DIRECTORY``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from vllm_models import make_model, save_checkpoint

from pulsenet.serving.vllm.exchange import Order, UpdateInfo, read_answer
from pulsenet.training.snapshot import take_snapshot


def make_experts() -> Any:
    """Return a tiny mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def make_latent() -> Any:
    """Return a tiny model with multi-head latent attention."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(1)
    config = DeepseekV2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        max_position_embeddings=512,
    )
    return DeepseekV2ForCausalLM(config).to(torch.bfloat16)


def make(kind: str) -> tuple[Any, str]:
    """Return a model and the dtype the engine is started with."""
    match kind:
        case "fp32":
            return make_model("llama", dtype=torch.float32), "float32"
        case "cast":
            return make_model("llama"), "float32"
        case "experts":
            return make_experts(), "bfloat16"
        case "latent":
            return make_latent(), "bfloat16"
        case _:
            raise SystemExit(f"no model is called {kind}")


def main() -> None:
    """Start, attach, print."""
    kind, place = sys.argv[1], Path(sys.argv[2])
    model, dtype = make(kind)
    checkpoint = save_checkpoint(model, place / "model")
    # As a publisher that keeps the checkpoint's names: transformers holds experts fused and saves them apart.
    state = {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}
    table = take_snapshot(state, compute_dtype=None).table
    from vllm import LLM

    llm: Any = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        weight_transfer_config={"backend": "pulsenet"},
    )
    node = place / "node"
    node.mkdir(mode=0o700)
    (node / "table").write_bytes(table.encode())
    order = UpdateInfo(Order.ATTACH, "t", str(node))
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": order.to_json()})
    while (answer := read_answer(node, 0)) is None:
        time.sleep(0.05)
    print(json.dumps({**dataclasses.asdict(answer), "windows": len(answer.windows)}))


if __name__ == "__main__":
    main()
