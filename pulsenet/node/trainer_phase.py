"""The publisher's phases, as a table."""

from __future__ import annotations

from enum import StrEnum

from pulsenet.node.events import (
    AnchorStored,
    Committed,
    EncodeFailed,
    Event,
    ExtraFailed,
    PatchEncoded,
    SkipEncoded,
    StoreFailed,
)


class Phase(StrEnum):
    """What the publisher is doing."""

    LEARNING = "learning"
    IDLE = "idle"
    ENCODING = "encoding"
    SKIPPING = "skipping"
    ANCHORING = "anchoring"
    COMMITTING = "committing"


TRANSITIONS: dict[tuple[Phase, type[Event]], Phase] = {
    (Phase.ENCODING, PatchEncoded): Phase.COMMITTING,
    (Phase.ENCODING, EncodeFailed): Phase.IDLE,
    (Phase.SKIPPING, SkipEncoded): Phase.COMMITTING,
    (Phase.SKIPPING, ExtraFailed): Phase.IDLE,
    (Phase.ANCHORING, AnchorStored): Phase.COMMITTING,
    (Phase.ANCHORING, ExtraFailed): Phase.IDLE,
    (Phase.COMMITTING, Committed): Phase.IDLE,
    (Phase.COMMITTING, EncodeFailed): Phase.IDLE,
    (Phase.COMMITTING, ExtraFailed): Phase.IDLE,
    (Phase.COMMITTING, StoreFailed): Phase.IDLE,
}
"""Where the answer to the work in hand leads. An answer without a cell belongs to work given up before."""
