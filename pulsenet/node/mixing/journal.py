"""What mixing must not forget with a process: the round it was in, what it agreed to, what it keeps.

Saved before whatever follows from it is said. Everything in it is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Final

from pulsenet import limits
from pulsenet.chain.records import SliceName
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import SaveState
from pulsenet.node.mixing.effects import Debt
from pulsenet.node.mixing.events import DebtName, PartSlice
from pulsenet.outer.mixing.settings import Job
from pulsenet.wire.messages import Record, ShareRecord
from pulsenet.wire.schema import CountMax, decode_value, encode_value

MIXING_KEY: Final = "mixing/journal"
"""Name of the journal among the node's durable state."""

TAKEN_MAX: Final = 64
"""Exchanges this node took first, of which it can still say so."""

DEBTS_MAX: Final = 32
"""Exchanges of which this node does not know that both sides have the mean; beyond, the oldest is given up."""

BLOBS_MAX: Final = 16 * limits.ROSTER_MEMBERS_MAX
"""Blobs of the rounds that are kept."""

Subset = Annotated[tuple[int, ...], CountMax(limits.TENSORS_MAX)]


class Stand(StrEnum):
    """Where this node stands in a pair's exchange."""

    TAKEN = "taken"
    """It is the lower key and took the mean; the other may not know."""
    ANSWERED = "answered"
    """It is the other one and showed its part; whether the mean was taken is not known here."""
    OWED = "owed"
    """The lower key took the mean and this node did not: the difference goes into the next vector."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One pair's job of one round."""

    round_index: int
    job: int
    partner: PeerId
    stand: Stand
    own: PartSlice
    mean: PartSlice
    subset: Subset
    share: ShareRecord
    """What this node last showed: its part, or that it took the mean."""

    @property
    def debt(self) -> Debt:
        """What is owed if the other side took the mean alone."""
        name = DebtName(self.round_index, Job(self.job))
        own = SliceName(self.own.blob_id, self.own.encoded_size_bytes)
        return Debt(name, own, SliceName(self.mean.blob_id, self.mean.encoded_size_bytes), self.subset)


@dataclass(frozen=True, slots=True)
class _Blob:
    round_index: int
    blob_id: Digest


@dataclass(frozen=True, slots=True)
class _State:
    round_index: int | None
    roster: Digest | None
    rosters: Annotated[tuple[Record, ...], CountMax(limits.ROSTERS_PER_REPLY_MAX)]
    exchanges: Annotated[tuple[bytes, ...], CountMax(TAKEN_MAX + DEBTS_MAX)]
    """Each encoded on its own, and once: a save follows every event and changes one of a hundred."""
    known_from: int
    blobs: Annotated[tuple[_Blob, ...], CountMax(BLOBS_MAX)]


class Journal:
    """The durable part of mixing.

    Args:
        data: What was last saved under ``MIXING_KEY``.

    Raises:
        StorageError: it is damaged.
    """

    def __init__(self, data: bytes | None) -> None:
        state = _State(None, None, (), (), 0, ())
        exchanges: list[Exchange] = []
        if data is not None:
            try:
                state = decode_value(_State, data)
                exchanges = [decode_value(Exchange, each) for each in state.exchanges]
            except RemoteProtocolError as error:
                raise StorageError(f"the journal of mixing is damaged: {error}", reason="damaged") from error
        self.round_index = state.round_index
        """The newest round that was opened by a roster; none is opened twice."""
        self.roster = state.roster
        """By which roster."""
        self.stored_rosters = state.rosters
        self.known_from = state.known_from
        self._exchanges = {(each.round_index, each.job): each for each in exchanges}
        self._encoded: dict[tuple[int, int], tuple[Exchange, bytes]] = {}
        self._blobs = {blob.blob_id: blob.round_index for blob in state.blobs}
        self.is_changed = False
        """Whether something is not saved yet; :meth:`save` clears it."""

    # Exchanges

    def exchange(self, round_index: int, job: int) -> Exchange | None:
        """Return what is known of a pair's job."""
        return self._exchanges.get((round_index, job))

    def exchanges(self, stand: Stand) -> list[Exchange]:
        """Return the exchanges that stand so, ascending by round."""
        return [self._exchanges[key] for key in sorted(self._exchanges) if self._exchanges[key].stand is stand]

    def stands(self) -> dict[tuple[int, int], Stand]:
        """Return where this node stands in every exchange that is kept, by round and job."""
        return {place: exchange.stand for place, exchange in self._exchanges.items()}

    def note(self, exchange: Exchange) -> list[Exchange]:
        """Keep an exchange; return the debts that had to be given up for it."""
        self._exchanges[exchange.round_index, exchange.job] = exchange
        self.is_changed = True
        taken = self.exchanges(Stand.TAKEN)
        for old in taken[: max(len(taken) - TAKEN_MAX, 0)]:
            self.known_from = max(self.known_from, old.round_index + 1)
            del self._exchanges[old.round_index, old.job]
        open_ones = sorted(
            (*self.exchanges(Stand.ANSWERED), *self.exchanges(Stand.OWED)),
            key=lambda each: (each.round_index, each.job),
        )
        gone = open_ones[: max(len(open_ones) - DEBTS_MAX, 0)]
        for old in gone:
            del self._exchanges[old.round_index, old.job]
        return gone

    def turn(self, exchange: Exchange, stand: Stand) -> None:
        """Say where an exchange stands now."""
        self._exchanges[exchange.round_index, exchange.job] = replace(exchange, stand=stand)
        self.is_changed = True

    def drop(self, round_index: int, job: int) -> None:
        """Forget an exchange: both sides have the mean, or neither."""
        if self._exchanges.pop((round_index, job), None) is not None:
            self.is_changed = True

    # Rounds

    def open(self, round_index: int, roster: Digest) -> None:
        """A round was opened by a roster."""
        self.round_index, self.roster = round_index, roster
        self.is_changed = True

    # Blobs

    def track(self, round_index: int, blob_id: Digest) -> None:
        """A blob of a round is here, or on its way; an equal one of an earlier round stays as long as this one."""
        if self._blobs.get(blob_id, -1) < round_index and len(self._blobs) < BLOBS_MAX:
            self._blobs[blob_id] = round_index
            self.is_changed = True

    @property
    def blob_count(self) -> int:
        """Blobs that are kept for mixing."""
        return len(self._blobs)

    @property
    def blob_ids(self) -> frozenset[Digest]:
        """Blobs that are kept for mixing, debts included."""
        return frozenset(self._blobs) | self._owed

    @property
    def _owed(self) -> frozenset[Digest]:
        return frozenset(blob_id for each in self._exchanges.values() for blob_id in _blobs_of(each))

    def release_before(self, round_index: int, used: set[Digest]) -> tuple[Digest, ...]:
        """Return the blobs of earlier rounds that nothing needs any more, and stop tracking them."""
        used = used | self._owed
        gone = tuple(sorted(b for b, index in self._blobs.items() if index < round_index and b not in used))
        for blob_id in gone:
            del self._blobs[blob_id]
            self.is_changed = True
        return gone

    def save(self, rosters: tuple[bytes, ...]) -> SaveState:
        """Return the order to store all of it."""
        self.is_changed, self.stored_rosters = False, rosters
        self._encode_exchanges()
        state = _State(
            round_index=self.round_index,
            roster=self.roster,
            rosters=rosters,
            exchanges=tuple(self._encoded[key][1] for key in sorted(self._encoded)),
            known_from=self.known_from,
            blobs=tuple(_Blob(round_index, blob_id) for blob_id, round_index in self._blobs.items()),
        )
        return SaveState(MIXING_KEY, encode_value(state))

    def _encode_exchanges(self) -> None:
        known = self._encoded
        self._encoded = {}
        for key, exchange in self._exchanges.items():
            last = known.get(key)
            self._encoded[key] = last if last and last[0] is exchange else (exchange, encode_value(exchange))


def _blobs_of(exchange: Exchange) -> tuple[Digest, ...]:
    # What was taken is in z already; only debts still need their blobs.
    return () if exchange.stand is Stand.TAKEN else (exchange.own.blob_id, exchange.mean.blob_id)
