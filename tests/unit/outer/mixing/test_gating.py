import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.mixing.gating import gate_vector, move_common, take_whole
from pulsenet.outer.mixing.mean import mean_entries, spread
from pulsenet.tensors.bf16 import cast_to_bf16_bits

law = settings(derandomize=True, deadline=None, max_examples=60)


def weights(seed: int, count: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=0.02, size=count).astype(np.float32)


@law
@given(st.integers(0, 1 << 32), st.floats(1e-7, 1e-3))
def test_what_is_sent_and_what_is_held_are_what_moved(seed: int, scale: float) -> None:
    start, held = weights(seed), weights(seed + 1) * np.float32(scale)
    now = start + weights(seed + 2) * np.float32(scale)
    moved = held + (start - now)
    residual = held.copy()
    sent = gate_vector(start, now, residual, tensor_index=3)
    assert sent.tensor_index == 3
    assert sent.indices is not None
    assert (spread(sent, start.size) + residual).tobytes() == moved.tobytes()
    changes = cast_to_bf16_bits(start) != cast_to_bf16_bits(start - moved)
    assert np.flatnonzero(changes).tolist() == sent.indices.tolist()


def test_what_creeps_is_followed_within_a_step_of_the_cast() -> None:
    """Iterates move by a 32nd of a BF16 step a round: the gate holds them until they are a step away."""
    common, own, residual = np.ones(1, np.float32), np.ones(1, np.float32), np.zeros(1, np.float32)
    sent_count = 0
    for _ in range(320):
        own += np.float32(2.0**-12)
        sent = gate_vector(common, own, residual, tensor_index=0)
        sent_count += len(sent)
        common = move_common(common, sent)
        # A round starts from the mean: what was held of the own iterate is in the residual alone.
        own = common.copy()
        assert abs(float(residual[0])) <= 2.0**-7
    assert 9 <= sent_count <= 22
    assert float(common[0]) - float(residual[0]) == 1.0 + 320 * 2.0**-12


def test_gated_iterates_of_many_trainers_keep_their_mean_in_means_and_residuals() -> None:
    common = weights(0)
    iterates = [common + weights(seed) * np.float32(1e-3) for seed in (1, 2, 3)]
    residuals = [np.zeros_like(common) for _ in iterates]
    parts = {
        bytes([place]): gate_vector(common, own, held, tensor_index=0)
        for place, (own, held) in enumerate(zip(iterates, residuals, strict=True))
    }
    mixed = move_common(common, mean_entries(parts, tensor_index=0, element_count=common.size))
    restored = mixed.astype(np.float64) - np.mean(np.stack(residuals).astype(np.float64), axis=0)
    assert np.abs(restored - np.mean(np.stack(iterates).astype(np.float64), axis=0)).max() < 1e-8


def test_a_vector_that_travels_whole_takes_what_was_held_along() -> None:
    now, residual = np.array([1.0, 2.0], np.float32), np.array([0.25, -0.5], np.float32)
    assert take_whole(now, residual).tolist() == [0.75, 2.5]
    assert residual.tolist() == [0.0, 0.0]
    assert now.tolist() == [1.0, 2.0]
    with pytest.raises(LocalProtocolError):
        take_whole(now, np.zeros(3, np.float32))


def test_a_mean_moves_the_common_iterate_where_it_has_entries() -> None:
    common = np.array([1.0, 2.0, 3.0], np.float32)
    mean = Entries(0, np.array([1], np.uint32), np.array([0.5], np.float32))
    assert move_common(common, mean).tolist() == [1.0, 1.5, 3.0]
    with pytest.raises(LocalProtocolError):
        move_common(common[:1], mean)
