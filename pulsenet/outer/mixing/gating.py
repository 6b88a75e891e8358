"""Gated mixing: only entries travel that would change a BF16 cast, the rest waits (SPEC outer, "Mixing").

A vector travels as what moved since a start: pseudo-gradients since the own outer iterate, outer iterates since the
last mean that all members hold. Each has a residual of its own. What is sent and what is held are together exactly what
moved and what was held before, whether or not anybody heard it: a trainer that mixes alone uses what it sent.
"""

from __future__ import annotations

import numpy as np

from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s, check_flat, settle_nans
from pulsenet.outer.gate import gate_entries
from pulsenet.outer.mixing.mean import spread
from pulsenet.outer.residual import settle_counted


def gate_vector(start: FP32s, now: FP32s, residual: FP32s, *, tensor_index: int) -> Entries:
    """Return the entries of ``residual + (start - now)`` that pass the gate; the others become the residual, in place.

    Args:
        start: What the vector moved from, flat: its BF16 cast decides.
        now: Where it is.
        residual: What the gate held back so far.
        tensor_index: Of the tensor, in the job's table.

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    sent = gate_entries(start, now, residual, tensor_index=tensor_index)
    settle_counted(residual, start, now, sent)
    return sent


def take_whole(now: FP32s, residual: FP32s) -> FP32s:
    """Return ``now - residual``: what travels when a gated vector travels whole; the residual becomes zero, in place.

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    check_flat(now)
    check_flat(residual, now.size)
    with np.errstate(all="ignore"):
        whole = settle_nans(now - residual)
    residual[:] = 0.0
    return whole


def move_common(common: FP32s, mean: Entries) -> FP32s:
    """Return ``common - mean``: the next mean of the outer iterates, from the last and the mean of what moved.

    Raises:
        LocalProtocolError: entries outside the tensor.
    """
    with np.errstate(all="ignore"):
        return settle_nans(common - spread(mean, common.size))
