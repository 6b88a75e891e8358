"""Which rosters a node knows, and which of them a round is mixed by (SPEC section 6.15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Roster
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.wire.schema import decode_value


@dataclass(frozen=True, slots=True)
class KnownRoster:
    """A roster that was accepted."""

    roster: Roster
    digest: Digest
    """Names it in shares, and is the seed of its matchings."""
    record: bytes

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who mixes, ascending."""
        return self.roster.members

    def covers(self, round_index: int) -> bool:
        """Say whether a round lies in its range."""
        return self.roster.first_round <= round_index < self.roster.end_round


class Rosters:
    """The newest rosters; shared by the node's machines, as the ledger is.

    Args:
        trust: The run's rules.
        ledger: Whose term it is.
    """

    def __init__(self, trust: Trust, ledger: Ledger) -> None:
        self._trust = trust
        self._ledger = ledger
        self._known: tuple[KnownRoster, ...] = ()
        self._measured: tuple[int, int] | None = None

    @property
    def newest(self) -> KnownRoster | None:
        """The roster of the latest term and highest number."""
        return self._known[-1] if self._known else None

    @property
    def known(self) -> tuple[KnownRoster, ...]:
        """The rosters that are kept, ascending by term and number."""
        return self._known

    @property
    def end_round(self) -> int:
        """No known roster covers this round or a later one."""
        return max((known.roster.end_round for known in self._known), default=0)

    @property
    def measured(self) -> tuple[int, int] | None:
        """The newest probe that is known answered: its round, and the distance between trainers as FP32 bits."""
        found = [(known.roster.probe_round, known.roster.distance_bits) for known in self._known]
        told = [(index, bits) for index, bits in found if index is not None and bits is not None]
        return max(told + ([] if self._measured is None else [self._measured]), default=None)

    def note_measured(self, round_index: int, distance_bits: int) -> None:
        """This node, as the coordinator, knows what a probe came to; the next rosters say so."""
        self._measured = (round_index, distance_bits)

    def find(self, round_index: int) -> KnownRoster | None:
        """Return the roster that a round is mixed by: of those that cover it the newest."""
        return next((known for known in reversed(self._known) if known.covers(round_index)), None)

    def get(self, digest: Digest) -> KnownRoster | None:
        """Return a roster by its digest, if it is kept."""
        return next((known for known in self._known if known.digest == digest), None)

    def records(self) -> tuple[bytes, ...]:
        """Return the encoded signed rosters, ascending by term and number; :meth:`restore` reads them back."""
        return tuple(known.record for known in self._known)

    def accept(self, record: bytes) -> bool:
        """Take an encoded signed roster and say whether it is news.

        Raises:
            TrustError: ``untrusted`` while no term is proved, ``conflict`` for a second roster of one term and number,
                or a code of ``Trust.accept_roster``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        signed = decode_signed(record)
        digest = record_digest(signed)
        if self.get(digest) is not None:
            return False
        mandate = self._ledger.mandate
        if mandate is None:
            raise TrustError("untrusted", "a roster, but no term is proved")
        if signed.type == Roster.TYPE and decode_value(Roster, signed.payload).term < mandate.term:
            # It may have been good when it was signed; nobody can tell now, and a newer one is due.
            return False
        roster = self._trust.accept_roster(signed, term=mandate.term, coordinator=mandate.coordinator)
        order = (roster.term, roster.number)
        if any((known.roster.term, known.roster.number) == order for known in self._known):
            raise TrustError("conflict", f"two rosters number {roster.number} of term {roster.term}")
        return self._keep(KnownRoster(roster, digest, encode_signed(signed)))

    def restore(self, records: Sequence[bytes]) -> None:
        """Take what :meth:`records` returned in an earlier life; who may sign is not asked again.

        Raises:
            StorageError: it is damaged.
        """
        try:
            for record in records:
                signed = decode_signed(record)
                self._keep(KnownRoster(decode_value(Roster, signed.payload), record_digest(signed), record))
        except RemoteProtocolError as error:
            raise StorageError(f"a stored roster is damaged: {error}", reason="damaged") from error

    def _keep(self, new: KnownRoster) -> bool:
        """Keep a roster, and drop those whose every round a newer one takes over from its first round on."""
        ordered = sorted((*self._known, new), key=lambda known: (known.roster.term, known.roster.number))
        kept: list[KnownRoster] = []
        for known in reversed(ordered):
            if not kept or known.roster.first_round < kept[-1].roster.first_round:
                kept.append(known)
        self._known = tuple(reversed(kept[: limits.ROSTERS_PER_REPLY_MAX]))
        return new in self._known
