"""What other members shared for this node, in bounded room: the round that is open and the two newest after it."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import Share, ShareKind
from pulsenet.ids import Digest, PeerId

ROUNDS_KEPT_MAX: Final = 3
"""Rounds of which shares are kept. Each signer has one share of a kind and slice in a job, so a round has an end."""

Key = tuple[int, ShareKind, int, PeerId]
"""Job, kind, slice and signer."""


class Inbox:
    """Accepted shares by round."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[Key, tuple[Share, Digest, bytes]]] = {}
        self._heard: dict[PeerId, int] = {}

    def __len__(self) -> int:
        return sum(len(shares) for shares in self._rounds.values())

    def heard_max(self, end_round: int) -> int:
        """Return the newest round below ``end_round`` that any member shared something of; 0 if none did."""
        return max((heard for heard in self._heard.values() if heard < end_round), default=0)

    def note_heard(self, peer_id: PeerId, round_index: int) -> None:
        """A member shared something of a round."""
        self._heard[peer_id] = max(round_index, self._heard.get(peer_id, 0))

    def may_keep(self, round_index: int, open_round: int) -> bool:
        """Say whether shares of a round are kept: of the open one always, of later ones of the two newest."""
        later = self._list_later(open_round)
        is_known = round_index == open_round or round_index in later
        return is_known or len(later) < ROUNDS_KEPT_MAX - 1 or round_index > later[0]

    def add(self, share: Share, digest: Digest, record: bytes, open_round: int) -> str:
        """Keep a share; return ``duplicate`` if its signer shared something else there, else nothing.

        Args:
            digest: Of the share's payload.
            record: Encoded and signed, to be passed on.
            open_round: The round that is open here.
        """
        later = self._list_later(open_round)
        is_new = share.round_index != open_round and share.round_index not in later
        if is_new and len(later) >= ROUNDS_KEPT_MAX - 1:
            del self._rounds[later[0]]
        shares = self._rounds.setdefault(share.round_index, {})
        key = (share.job, share.kind, share.slice_index, share.peer_id)
        if key in shares and shares[key][0].roster == share.roster:
            return "" if shares[key][1] == digest else "duplicate"
        shares[key] = (share, digest, record)
        return ""

    def _list_later(self, open_round: int) -> list[int]:
        return sorted(index for index in self._rounds if index != open_round)

    def find(
        self, round_index: int, job: int, kind: ShareKind, slice_index: int, peer_id: PeerId
    ) -> tuple[Share, bytes] | None:
        """Return a share and its record, if it came."""
        found = self._rounds.get(round_index, {}).get((job, kind, slice_index, peer_id))
        return None if found is None else (found[0], found[2])

    def open(self, round_index: int, roster: Digest | None, members: frozenset[PeerId]) -> None:
        """Drop the shares of earlier rounds, those of this one by another roster, and what strangers told.

        Args:
            round_index: The round that is opened.
            roster: By which it is mixed, if it is.
            members: Of that roster.
        """
        self._rounds = {index: shares for index, shares in self._rounds.items() if index >= round_index}
        due = self._rounds.get(round_index, {})
        # A newer roster may have taken the round over since they came.
        self._rounds[round_index] = {key: found for key, found in due.items() if found[0].roster == roster}
        if roster is not None:
            self._heard = {peer_id: heard for peer_id, heard in self._heard.items() if peer_id in members}
