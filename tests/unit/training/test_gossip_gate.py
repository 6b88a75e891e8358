"""Gated mixing in a training process: nothing is lost, whatever travels and whoever hears it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.training.gossip_gate import GossipGate

TABLE = make_table([TensorSpec("a", "F32", (500,)), TensorSpec("b", "F32", (3,))])


def draw(seed: int, scale: float = 1.0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [(scale * random.normal(size=spec.element_count)).astype(np.float32) for spec in TABLE.tensors]


def dense(values: list[Any]) -> list[Entries]:
    return [Entries(index, None, one) for index, one in enumerate(values)]


def test_nothing_relative_is_sent_before_there_is_a_common_mean() -> None:
    gate = GossipGate(TABLE)
    with pytest.raises(LocalProtocolError, match="base"):
        list(gate.send_iterate(dense(draw(0)), round_index=1, is_relative=True))
    assert gate.take_iterate(None, is_common=False) is None, "the step is taken from z"


def test_a_whole_round_makes_the_mean_that_later_ones_move_from() -> None:
    gate, z = GossipGate(TABLE), draw(0)
    sent = list(gate.send_iterate(dense(z), round_index=0, is_relative=False))
    assert [one.indices for one in sent] == [None, None]
    mean = draw(1)
    x = gate.take_iterate(mean, is_common=True)
    assert x is not None
    assert gate.common is not None
    np.testing.assert_array_equal(x[0], mean[0])
    moved = [common - np.float32(1e-5) * np.abs(common) for common in gate.common]
    sent = list(gate.send_iterate(dense(moved), round_index=1, is_relative=True))
    assert sum(len(one) for one in sent) < TABLE.element_count, "most of it changes no BF16 cast"
    for index, one in enumerate(sent):
        total = gate.iterate_residual[index] + gate.spread(one)
        np.testing.assert_allclose(total, gate.common[index] - moved[index], rtol=0, atol=1e-9)


def test_alone_a_trainer_uses_what_it_sent() -> None:
    gate, z = GossipGate(TABLE), draw(0)
    list(gate.send_iterate(dense(z), round_index=0, is_relative=False))
    gate.take_iterate(z, is_common=True)
    moved = [one + np.float32(0.5) for one in z]
    list(gate.send_iterate(dense(moved), round_index=1, is_relative=True))
    x = gate.take_iterate(None, is_common=False)
    assert x is not None
    assert gate.common is not None
    for index, values in enumerate(x):
        np.testing.assert_allclose(values, moved[index] + gate.iterate_residual[index], atol=1e-6)
        np.testing.assert_array_equal(gate.common[index], z[index])


def test_a_pseudo_gradient_and_its_residual_are_what_moved() -> None:
    gate = GossipGate(TABLE)
    z, local = draw(0), draw(0)
    for round_index in range(3):
        local = [one - np.float32(1e-4) * np.abs(one) for one in local]
        before = gate.gradient_residual[0].copy()
        sent = gate.send_gradient(0, z[0], local[0])
        total = gate.gradient_residual[0] + gate.spread(sent)
        np.testing.assert_allclose(total, before + (z[0] - local[0]), rtol=0, atol=1e-7)
        assert round_index or len(sent) < 500


def test_a_checkpoint_brings_residuals_and_the_common_mean_back() -> None:
    gate = GossipGate(TABLE)
    other = GossipGate(TABLE)
    other.unpack(gate.pack())
    assert other.common is None
    list(gate.send_iterate(dense(draw(0)), round_index=0, is_relative=False))
    gate.take_iterate(draw(1), is_common=True)
    gate.send_gradient(0, draw(0)[0], draw(2)[0])
    other.unpack({kind: {name: torch.clone(t) for name, t in held.items()} for kind, held in gate.pack().items()})
    for mine, theirs in zip(
        (*gate.iterate_residual, *gate.gradient_residual, *(gate.common or ())),
        (*other.iterate_residual, *other.gradient_residual, *(other.common or ())),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)
    sent = list(gate.send_iterate(dense(draw(3)), round_index=7, is_relative=True))
    residual = gate.iterate_residual[0].copy()
    other.unpack(gate.pack())
    again = list(other.send_iterate(dense(draw(3)), round_index=7, is_relative=True))
    assert all(one.same_as(two) for one, two in zip(sent, again, strict=True)), "what was under way is sent again"
    np.testing.assert_array_equal(other.iterate_residual[0], residual)
    other.forget_sent()
    assert other.take_iterate(None, is_common=False) is None
    other.unpack({})
    assert other.common is None
    assert not other.gradient_residual[0].any()
