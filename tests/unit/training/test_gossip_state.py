"""The outer state of gossip: the bits of the numpy twin, placements, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.outer.mixing.step import compute_gradient, step_mixed_twin
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.training.gossip_state import GossipState, MixingCounters, pack_mixing, unpack_mixing

SHAPES = {"a": (3, 70_001), "b": (5,)}
AWKWARD = np.array([1e-45, -0.0, np.nan, 3e38, -3e38], np.float32)


def make_state(seed: int = 0, **placements: Any) -> tuple[GossipState, list[torch.Tensor], np.random.Generator]:
    draw = np.random.default_rng(seed)
    table = make_table(TensorSpec(name, "F32", shape) for name, shape in SHAPES.items())
    locals_ = [torch.from_numpy(draw.normal(size=spec.shape).astype(np.float32)) for spec in table.tensors]
    return GossipState(table, locals_, **placements), locals_, draw


def noise(draw: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = draw.normal(size=count).astype(np.float32)
    values[: AWKWARD.size] = AWKWARD[: min(count, AWKWARD.size)]
    return values


@pytest.mark.parametrize("given", ["nothing", "x", "delta", "momentum", "all"])
def test_a_step_has_the_bits_of_the_numpy_twin(given: str) -> None:
    state, locals_, draw = make_state()
    rate, factor = np.float32(0.7), np.float32(0.9)
    for index, local in enumerate(locals_):
        count = local.numel()
        state.momentum[index].copy_(torch.from_numpy(noise(draw, count)))
        z, velocity = state.z[index].numpy().copy(), state.momentum[index].numpy().copy()
        with torch.no_grad():
            local.sub_(torch.from_numpy(1e-3 * draw.normal(size=local.shape).astype(np.float32)))
        chosen = {name: noise(draw, count) if given in (name, "all") else None for name in ("x", "delta", "momentum")}
        own = compute_gradient(z, local.numpy().reshape(-1).copy())
        expected_v = velocity if chosen["momentum"] is None else chosen["momentum"].copy()
        expected = step_mixed_twin(
            z if chosen["x"] is None else chosen["x"],
            expected_v,
            own if chosen["delta"] is None else chosen["delta"],
            learning_rate=rate,
            momentum_factor=factor,
        )
        for values in chosen.values():
            if values is not None:
                values.flags.writeable = False
        squares = state.step(index, local, **chosen, learning_rate=0.7, momentum_factor=0.9)
        np.testing.assert_array_equal(state.z[index].numpy().view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(state.momentum[index].numpy().view(np.uint32), expected_v.view(np.uint32))
        assert squares[0] == pytest.approx(float(np.sum(np.square(own.astype(np.float64)))))
        assert (squares[1] == 0.0) == (chosen["x"] is None)
        assert (squares[2] == 0.0) == (chosen["delta"] is None)
        if chosen["delta"] is not None:
            gap = own.astype(np.float64) - chosen["delta"]
            assert squares[2] == pytest.approx(float(np.sum(np.square(gap))), rel=1e-5, nan_ok=True)


def test_a_delta_is_z_minus_the_master_and_shares_nothing() -> None:
    state, locals_, draw = make_state()
    with torch.no_grad():
        locals_[0].add_(torch.from_numpy(draw.normal(size=locals_[0].shape).astype(np.float32)))
    before = state.z[0].numpy().copy()
    delta = state.compute_delta(0, locals_[0])
    expected = compute_gradient(before, locals_[0].numpy().reshape(-1))
    np.testing.assert_array_equal(delta.view(np.uint32), expected.view(np.uint32))
    delta[:] = 0.0
    np.testing.assert_array_equal(state.z[0].numpy(), before)


def test_a_delta_is_in_host_memory_whatever_device_is_the_default() -> None:
    state, locals_, _ = make_state()
    expected = state.compute_delta(0, locals_[0])
    with torch.device("meta"):
        np.testing.assert_array_equal(state.compute_delta(0, locals_[0]), expected)


def test_entries_are_dense_and_in_the_order_asked_for() -> None:
    state, _, _ = make_state()
    (second,) = state.entries(state.z, [1])
    assert (second.tensor_index, second.indices, len(second)) == (1, None, 5)


def test_an_adopted_z_begins_without_momentum() -> None:
    state, locals_, draw = make_state()
    state.momentum[0].fill_(3.0)
    values = [noise(draw, local.numel())[AWKWARD.size :] for local in locals_]
    with pytest.raises(ConfigError, match="elements are offered"):
        state.adopt(values)
    assert float(state.momentum[0][0]) == 3.0, "nothing was taken"
    values = [noise(draw, local.numel()) for local in locals_]
    state.adopt(values)
    np.testing.assert_array_equal(state.z[0].numpy(), values[0])
    assert not state.momentum[0].any()
    state.restart(0, locals_[0])
    np.testing.assert_array_equal(locals_[0].numpy().reshape(-1), values[0])


def test_copies_in_a_file_step_as_those_beside_the_parameters(tmp_path: Path) -> None:
    near, near_locals, _ = make_state()
    far, far_locals, _ = make_state(z=tmp_path / "z", momentum="host")
    for state, locals_ in ((near, near_locals), (far, far_locals)):
        with torch.no_grad():
            locals_[0].mul_(0.99)
        state.step(0, locals_[0], x=None, delta=None, momentum=None, learning_rate=0.7, momentum_factor=0.9)
    np.testing.assert_array_equal(near.z[0].numpy(), far.z[0].numpy())
    assert (tmp_path / "z").stat().st_size >= 4 * 3 * 70_001


def test_a_checkpoint_brings_everything_back() -> None:
    state, locals_, _ = make_state()
    state.momentum[1].fill_(2.0)
    counters = MixingCounters(inner_steps=9, inner_seconds=1.5, blocked_seconds=0.5)
    assert counters.utilization == 0.75
    saved = pack_mixing(state.table, state, locals_, {"round_index": 4, "inner_step": 2, "warmup_left": 1}, counters)
    other, other_locals, _ = make_state(seed=1)
    changed = {**saved, "counters": {**saved["counters"], "newer": 1}}
    numbers, found = unpack_mixing(changed, other.table, other, other_locals)
    assert numbers == {"round_index": 4, "inner_step": 2, "warmup_left": 1}
    assert found == counters
    for mine, theirs in zip(
        (*state.z, *state.momentum, *locals_), (*other.z, *other.momentum, *other_locals), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "diloco"}, "none of a GossipOptimizer"),
        ({"format": 7}, "format 7"),
        ({"table_digest": "00"}, "other masters"),
        ({"z": {}}, "holds no z"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    state, locals_, _ = make_state()
    before = state.z[0].clone()
    saved = {**pack_mixing(state.table, state, locals_, {}, MixingCounters()), **change}
    state.z[0].add_(1.0)
    with pytest.raises(ConfigError, match=message):
        unpack_mixing(saved, state.table, state, locals_)
    assert torch.equal(state.z[0], before + 1.0)


def test_nothing_measured_counts_as_fully_used() -> None:
    assert MixingCounters().utilization == 1.0
