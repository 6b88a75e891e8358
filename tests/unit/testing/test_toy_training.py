"""The toy training process keeps its own promises, or the simulation would prove nothing."""

from __future__ import annotations

import numpy as np

from pulsenet.chain.records import Contribution, Member
from pulsenet.chain.rules import FP32_ONE_BITS
from pulsenet.ids import PeerId, RunId, compute_digest
from pulsenet.node.effects import Fate, StepState
from pulsenet.testing.fakes import FakeStore
from pulsenet.testing.toy_training import ToyTraining, TrainingDisk, start_state

ME = PeerId(b"m" * 32)
NAME = compute_digest(b"name")


def make_training() -> ToyTraining:
    return ToyTraining(ME, TrainingDisk(start_state()), FakeStore(), 7)


def order_of(training: ToyTraining, fate: Fate) -> StepState:
    stored = training.store_contribution()
    record = Contribution(
        RunId(NAME), 0, ME, 0, NAME, stored.blob_id, stored.encoded_size_bytes, 1, 6, stored.norm_bits, 1
    )
    return StepState(0, ((Member(ME, NAME, FP32_ONE_BITS), record),), fate)


def test_what_is_sent_and_what_is_kept_are_everything() -> None:
    training = make_training()
    training.run_inner_steps(2, 1)
    training.step(order_of(training, Fate.COUNTED))
    assert training.state is not None
    sent = 2 * (start_state().theta - training.state.theta)  # one member, half a step
    assert (training.made == sent.astype(np.float64) + training.state.residual).all()


def test_a_flush_cuts_what_it_sends_and_keeps_the_rest() -> None:
    training = make_training()
    training.disk.flush_interval = 1
    training.run_inner_steps(20, 1)
    training.step(order_of(training, Fate.COUNTED))
    assert training.state is not None
    sent = 2 * (start_state().theta - training.state.theta)
    assert (sent * 128 == np.trunc(sent * 128)).all()
    assert sent.any()
    assert training.state.residual.any()
    assert (np.abs(training.state.residual) < 1 / 128).all()
    assert (training.made == sent.astype(np.float64) + training.state.residual).all()


def test_a_missed_round_keeps_everything_and_a_dropped_one_nothing() -> None:
    for fate in (Fate.MISSED, Fate.DROPPED):
        training = make_training()
        training.run_inner_steps(2, 1)
        training.step(order_of(training, fate))
        assert training.state is not None
        kept, gone = (training.made, 0 * training.made) if fate is Fate.MISSED else (0 * training.made, training.made)
        assert (training.state.residual == kept).all()
        assert (training.dropped == gone).all()


def test_nothing_is_done_twice_that_bears_a_rounds_number() -> None:
    training = make_training()
    training.run_inner_steps(2, 1)
    assert training.store_contribution() is training.store_contribution()
    order = order_of(training, Fate.COUNTED)
    assert training.step(order) == training.step(order)


def test_an_anchor_restores_the_state_bit_for_bit() -> None:
    training = make_training()
    training.run_inner_steps(2, 1)
    training.step(order_of(training, Fate.COUNTED))
    round_index, state_root, blob_id, _ = training.write_anchor()
    other = ToyTraining(PeerId(bytes(32)), TrainingDisk(None), training._store, 8)
    assert other.attach().round_index is None
    restored = other.restore(blob_id, drops_residual=True)
    assert (other.state_root, getattr(restored, "round_index", None)) == (state_root, round_index)
