"""Whose fault a refused record is: what no honest peer sends costs its sender a strike (SPEC section 9)."""

from __future__ import annotations

from typing import Final

from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import PeerId
from pulsenet.node.effects import Count, Effect, StrikePeer

Refused = RemoteProtocolError | TrustError
"""Why a record was refused."""

OFFENCE_CODES: Final = frozenset({"signature", "wrong-type", "wrong-run"})
"""Rules that no honest peer breaks. Old, unknown or revoked is no offence: its news may be slow."""

UNRIPE_CODES: Final = frozenset({"epoch", "revision-unknown"})
"""Refusals that end once this node has fetched what the record builds on."""

OVERTAKEN_CODES: Final = frozenset({"rollback", "expired"})
"""What becomes of news that was overtaken on its way, and of the answer of a peer that is behind: nobody's fault."""


def is_offence(error: Refused) -> bool:
    """Say whether no honest peer passes such a record on."""
    return isinstance(error, RemoteProtocolError) or error.code in OFFENCE_CODES


def blame(error: Refused, source: PeerId | None) -> list[Effect]:
    """Return what a refused record leads to: it is counted once, and its sender struck if it is an offence."""
    counted: list[Effect] = [Count("rejected", error.code)]
    return [*counted, StrikePeer(source, error.code)] if source is not None and is_offence(error) else counted
