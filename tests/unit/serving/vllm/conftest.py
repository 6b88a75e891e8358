"""A model laid out as serving engines lay theirs out: fused, sharded, transposed, padded and tied weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # fake_vllm

HIDDEN, VOCABULARY, PADDED = 8, 10, 16


class ServedModel(torch.nn.Module):
    """One rank of a two-layer toy with vLLM's habits; its loader fills slices of fused parameters."""

    def __init__(self, rank: int = 0, ranks: int = 1, *, tied: bool = True) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        rows = HIDDEN // ranks

        def make(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.embed = make(PADDED, HIDDEN)
        self.head = self.embed if tied else make(PADDED, HIDDEN)
        self.qkv = make(3 * rows, HIDDEN)
        self.down = make(HIDDEN, rows)
        self.conv = make(HIDDEN, HIDDEN)
        self.bias = make(3 * rows)
        self.norm = torch.nn.Parameter(torch.ones(HIDDEN), requires_grad=False)
        self.register_buffer("scale", torch.zeros((), dtype=torch.bfloat16))
        with torch.no_grad():
            self.embed[VOCABULARY:] = self.head[VOCABULARY:] = 3.0
        self.load_count = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Put checkpoint tensors where they belong, as an engine's loader does."""
        self.load_count += 1
        rows = HIDDEN // self.ranks
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        for name, tensor in weights:
            if name in ("embed", "head"):
                if name == "head" and self.head is self.embed:
                    continue
                target = self.embed if name == "embed" else self.head
                target.data[:VOCABULARY].copy_(tensor)
                target.data[VOCABULARY:].fill_(0)
            elif name in ("q", "k", "v"):
                self.qkv.data.narrow(0, "qkv".index(name) * rows, rows).copy_(tensor[own])
            elif name in ("q_bias", "k_bias", "v_bias"):
                self.bias.data.narrow(0, "qkv".index(name[0]) * rows, rows).copy_(tensor[own])
            elif name == "down":
                self.down.data.copy_(tensor[:, own])
            elif name == "conv":
                self.conv.data.copy_(tensor.t())
            elif name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "scale":
                self.scale.copy_(tensor)
            else:
                raise KeyError(name)
        return set()


def make_published(seed: int, *, tied: bool = True) -> dict[str, torch.Tensor]:
    """Return a published state of the toy: checkpoint names and shapes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    embed = draw(VOCABULARY, HIDDEN)
    state = {"embed": embed, "head": embed if tied else draw(VOCABULARY, HIDDEN)}
    state |= {name: draw(HIDDEN, HIDDEN) for name in ("q", "k", "v", "down", "conv")}
    state |= {f"{name}_bias": draw(HIDDEN) for name in "qkv"}
    state["norm"] = torch.randn(HIDDEN, generator=generator)
    state["scale"] = draw(1)[0]
    return state


def load_real(model: ServedModel, state: Mapping[str, torch.Tensor]) -> None:
    """Load a state the ordinary way."""
    model.load_weights(state.items())


def get_bits(model: torch.nn.Module) -> dict[str, bytes]:
    """Return every parameter's and buffer's bytes."""
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


def fresh_bits(
    state: Mapping[str, torch.Tensor], rank: int = 0, ranks: int = 1, *, tied: bool = True
) -> dict[str, bytes]:
    """Return the bytes of a rank that loaded the state the ordinary way."""
    model = ServedModel(rank, ranks, tied=tied)
    load_real(model, state)
    return get_bits(model)


@pytest.fixture(name="served_model")
def served_model_fixture() -> type[ServedModel]:
    return ServedModel


@pytest.fixture(name="make_published")
def make_published_fixture() -> Callable[..., dict[str, torch.Tensor]]:
    return make_published


@pytest.fixture(name="fresh_bits")
def fresh_bits_fixture() -> Callable[..., dict[str, bytes]]:
    return fresh_bits


@pytest.fixture(name="get_bits")
def get_bits_fixture() -> Callable[[torch.nn.Module], dict[str, bytes]]:
    return get_bits
