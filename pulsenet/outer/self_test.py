"""One round over 1 KB of awkward values: every trainer reports its digest when it joins (SPEC outer, "Self-test").

A machine that flushes subnormals, fuses multiply-adds or divides by a reciprocal gets another digest and learns so
before its first contribution, not by a diverging state.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

import numpy as np
from blake3 import blake3

from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.gate import gate_entries
from pulsenet.outer.optimizer import step_nesterov
from pulsenet.outer.reduce import Counted, reduce_mean
from pulsenet.outer.residual import settle_counted
from pulsenet.outer.settings import OuterSettings

SELF_TEST_DIGEST: Final = Digest(bytes.fromhex("9520213833d1bb7a5e01eecc06b1a0a18887d6b54f3bdf063d2f9787c467d064"))
"""What every sound machine computes; made by the reference in ``proto/reference``."""

SELF_TEST_ELEMENTS: Final = 64
_SEED: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_ROUNDS: Final = 2
_TRAINER_SCALES: Final = (1.0, 0.3, 0.75)
"""Receipt scales of the three trainers; the second loses bits in every multiplication."""

_SPECIAL_BITS: Final = (0x00000001, 0x807FFFFF, 0x00800000, 0x80000000, 0x00000000, 0x3F808000, 0x3F818000, 0xBF7F8000)
"""Smallest and largest subnormal, smallest normal, both zeros, and ties of the BF16 cast; first of each array."""

_LAST_BITS: Final = (0x00018000, 0x00000007, 0x00000005, 0x00000009)
"""The last of each array: subnormals meet, and a subnormal passes the gate (theta is a tie of the cast)."""


class OuterMaths(Protocol):
    """The operations of a round on numpy arrays, wherever they are computed."""

    def gate(self, theta: FP32s, local: FP32s, residual: FP32s) -> Entries:
        """Return the entries that pass, as :func:`pulsenet.outer.gate.gate_entries`."""

    def settle(self, residual: FP32s, theta: FP32s, local: FP32s, sent: Entries, scale: np.float32) -> FP32s:
        """Return the residual after a counted round, as :func:`pulsenet.outer.residual.settle_counted`."""

    def mean(self, contributions: dict[bytes, Counted], element_count: int) -> FP32s:
        """Return the dense mean, as :func:`pulsenet.outer.reduce.reduce_mean`."""

    def step(
        self, theta: FP32s, momentum: FP32s, gradient: FP32s, learning_rate: np.float32, momentum_factor: np.float32
    ) -> tuple[FP32s, FP32s]:
        """Return theta and momentum after :func:`pulsenet.outer.optimizer.step_nesterov`."""


class NumpyMaths:
    """The operations as the core does them."""

    def gate(self, theta: FP32s, local: FP32s, residual: FP32s) -> Entries:
        """See :class:`OuterMaths`."""
        return gate_entries(theta, local, residual, tensor_index=0)

    def settle(self, residual: FP32s, theta: FP32s, local: FP32s, sent: Entries, scale: np.float32) -> FP32s:
        """See :class:`OuterMaths`."""
        settled = residual.copy()
        settle_counted(settled, theta, local, sent, scale=scale)
        return settled

    def mean(self, contributions: dict[bytes, Counted], element_count: int) -> FP32s:
        """See :class:`OuterMaths`."""
        found = reduce_mean(contributions, tensor_index=0, element_count=element_count)
        assert found.indices is not None
        dense = np.zeros(element_count, np.float32)
        dense[found.indices] = found.values
        return dense

    def step(
        self, theta: FP32s, momentum: FP32s, gradient: FP32s, learning_rate: np.float32, momentum_factor: np.float32
    ) -> tuple[FP32s, FP32s]:
        """See :class:`OuterMaths`."""
        theta, momentum = theta.copy(), momentum.copy()
        step_nesterov(theta, momentum, gradient, learning_rate=learning_rate, momentum_factor=momentum_factor)
        return theta, momentum


def make_self_test_input() -> tuple[FP32s, FP32s, FP32s, FP32s]:
    """Return theta, momentum, residual and delta: 64 FP32 values each, by integer arithmetic alone."""
    state = _SEED
    arrays: list[FP32s] = []
    # Exponent ranges: weights, then the three smaller quantities; the last two come near the rounding boundaries.
    for low_exponent, exponent_count in ((116, 12), (96, 24), (104, 16), (106, 16)):
        bits = list(_SPECIAL_BITS)
        while len(bits) < SELF_TEST_ELEMENTS:
            state, drawn = _draw(state)
            sign, mantissa = drawn >> 63, drawn & 0x7FFFFF
            exponent = low_exponent + ((drawn >> 32) & 0xFFFF) % exponent_count
            bits.append(sign << 31 | exponent << 23 | mantissa)
        # Each array's special values meet ordinary ones and specials of another kind.
        turn = 11 * len(arrays)
        bits = bits[-turn:] + bits[:-turn] if turn else bits
        bits[-1] = _LAST_BITS[len(arrays)]
        arrays.append(np.array(bits, np.uint32).view(np.float32))
    theta, momentum, residual, delta = arrays
    return theta, momentum, residual, delta


def run_self_test(maths: OuterMaths | None = None) -> Digest:
    """Return the digest of two rounds of three trainers; equal to ``SELF_TEST_DIGEST`` on a sound machine."""
    maths = NumpyMaths() if maths is None else maths
    settings = OuterSettings()
    learning_rate, momentum_factor = np.float32(settings.learning_rate), np.float32(settings.momentum_factor)
    theta, momentum, residual, delta = make_self_test_input()
    residuals = [np.roll(residual, 21 * trainer) for trainer in range(len(_TRAINER_SCALES))]
    hasher = blake3(b"pulsenet-outer-self-test-v1\0")
    for round_index in range(_ROUNDS):
        contributions: dict[bytes, Counted] = {}
        for trainer, scale in enumerate(np.array(_TRAINER_SCALES, np.float32)):
            local = theta - np.roll(delta, 21 * trainer + round_index)
            sent = maths.gate(theta, local, residuals[trainer])
            residuals[trainer] = maths.settle(residuals[trainer], theta, local, sent, scale)
            contributions[bytes([trainer])] = Counted(sent, scale)
            assert sent.indices is not None
            hasher.update(struct.pack("<I", len(sent)) + sent.indices.astype("<u4").tobytes())
            hasher.update(sent.values.astype("<f4").tobytes() + residuals[trainer].astype("<f4").tobytes())
        gradient = maths.mean(contributions, SELF_TEST_ELEMENTS)
        theta, momentum = maths.step(theta, momentum, gradient, learning_rate, momentum_factor)
        for values in (gradient, theta, momentum):
            hasher.update(values.astype("<f4").tobytes())
    return Digest(hasher.digest())


def _draw(state: int) -> tuple[int, int]:
    """Return SplitMix64's next state and number."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return state, mixed ^ (mixed >> 31)
