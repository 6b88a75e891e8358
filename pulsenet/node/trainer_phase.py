"""The publisher's phases, and what it waits for in each."""

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


ANSWERS: dict[Phase, tuple[type[Event], ...]] = {
    Phase.ENCODING: (PatchEncoded, EncodeFailed),
    Phase.SKIPPING: (SkipEncoded, ExtraFailed),
    Phase.ANCHORING: (AnchorStored, ExtraFailed),
    Phase.COMMITTING: (Committed, EncodeFailed, ExtraFailed, StoreFailed),
}
"""What may be said of the work in hand. Anything else of its kind belongs to work given up before."""
