"""What a round's outcome does to the residual (SPEC outer, "Residual").

Until the receipt is final nothing here is called: the residual of the round before, the masters at the round's
start and the local masters stand still, and the corrected pseudo-gradient is computed again from them.
"""

from __future__ import annotations

import numpy as np

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s, settle_nans
from pulsenet.outer.gate import correct_delta

SCALE_ONE = np.float32(1.0)


def split_scaled(values: FP32s, scale: np.float32) -> tuple[FP32s, FP32s]:
    """Split sent values into what a round counts of them and what their sender keeps: ``(counted, held)``.

    ``held = values - scale * values`` and ``counted = values - held``, each operation rounded by itself. Then
    ``counted + held == values`` exactly: one of the two subtractions is exact for every scale from 0 to 1. A scale of
    exactly 1 counts the values as they are and holds +0.

    Raises:
        LocalProtocolError: a scale outside 0 to 1.
    """
    if not 0.0 <= scale <= 1.0:
        raise LocalProtocolError(f"a contribution is scaled by {scale}, which is not from 0 to 1")
    if scale == SCALE_ONE:
        return values, np.zeros_like(values)
    with np.errstate(all="ignore"):
        held = settle_nans(values - np.float32(scale) * values)
        return settle_nans(values - held), held


def settle_counted(
    residual: FP32s,
    theta: FP32s,
    local: FP32s,
    sent: Entries,
    *,
    scale: np.float32 = SCALE_ONE,
    keeps_rest: bool = False,
) -> None:
    """Step 4, counted: the residual becomes what was not sent, and what clipping held of what was sent. In place.

    Args:
        residual: Of the round before.
        theta: Masters at the round's start.
        local: Masters at its end.
        sent: Own entries.
        scale: Given by the receipt.
        keeps_rest: Sent values may be cut; what was cut off stays.
    """
    correct_delta(theta, local, residual, out=residual)
    clear_sent(residual, sent, scale=scale, keeps_rest=keeps_rest)


def clear_sent(residual: FP32s, sent: Entries, *, scale: np.float32 = SCALE_ONE, keeps_rest: bool = False) -> None:
    """Take out of the residual what a counted contribution sent: it is in the masters of the whole run now.

    Also how a trainer restored from an older checkpoint avoids counting twice.

    Args:
        residual: Changed in place.
        sent: Own entries.
        scale: Given by the receipt.
        keeps_rest: The residual holds what the values were cut from: ``(residual - sent) + held`` stays, not ``held``.
            At scale 1 that is exact.
    """
    _, held = split_scaled(sent.values, scale)
    where = slice(None) if sent.indices is None else sent.indices
    if keeps_rest:
        with np.errstate(all="ignore"):
            held = settle_nans((residual[where] - sent.values) + held)
    residual[where] = held
