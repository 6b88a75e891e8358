"""Who published last, and when a publisher may go on with its own state or must open a new epoch.

A publisher that lost its state, or follows another one, must never use a number again: inferencers hold
weights under it. So every head of the run counts here, expired ones too, and a new epoch starts above them all.
"""

from __future__ import annotations

from enum import StrEnum

from pulsenet import limits
from pulsenet.chain.floor import EPOCH_OF_AUTHORITIES_MAX
from pulsenet.chain.records import Head, SignedRecord
from pulsenet.chain.signing import Verify, decode_signed, open_record
from pulsenet.chain.trust import Trust
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, Version, short
from pulsenet.node.published import PublishedState
from pulsenet.node.scribe import Scribe
from pulsenet.wire.schema import INTEGER_MAX

CLOCK_MARGIN_MS = round(limits.CLOCK_OFFSET_SECONDS_MAX * 1000)
"""A head issued less than this after our start may still be of our former self."""


class Standing(StrEnum):
    """How a head relates to what this publisher committed."""

    KNOWN = "known"
    """Ours, or older than ours and not in conflict with it."""
    FORMER = "former"
    """Not our state, signed before this process started: a life whose state was lost, or a predecessor."""
    LIVE = "live"
    """Not our state, signed since: somebody else publishes this run now."""


def judge_head(head: Head, state: PublishedState | None, started_ms: int) -> Standing:
    """Say how ``head`` relates to the committed ``state`` of a publisher that started at ``started_ms``."""
    if state is not None and head.version <= state.version and state.root_of(head.version) in (None, head.root):
        return Standing.KNOWN
    return Standing.LIVE if head.issued_at_ms > started_ms + CLOCK_MARGIN_MS else Standing.FORMER


class Succession:
    """What a publisher knows about the versions before and beside its own.

    Args:
        trust: The run's rules.
        verify: Checks an Ed25519 signature.
        scribe: Signs epoch records.
    """

    def __init__(self, trust: Trust, verify: Verify, scribe: Scribe) -> None:
        self._trust = trust
        self._verify = verify
        self._scribe = scribe
        self._newest: Head | None = None
        self._signer: PeerId | None = None
        self._is_contested = False
        self._reason = ""
        self._rival: tuple[Head, PeerId] | None = None
        self._read_signer: PeerId | None = None

    @property
    def newest(self) -> Head | None:
        """The head with the highest version seen."""
        heads = [head for head in (self._heard, self._trust.head) if head is not None]
        return max(heads, key=lambda head: head.version, default=None)

    @property
    def _heard(self) -> Head | None:
        """The head with the highest version read, unless the owners said since that it binds nobody."""
        if self._newest is None or self._signer is None or not self._trust.binds(self._newest, self._signer):
            return None
        return self._newest

    @property
    def rival(self) -> Head | None:
        """Proof that somebody else publishes this run at the same time as we do, and still may."""
        return None if self._rival is None or not self._trust.may_publish(self._rival[1]) else self._rival[0]

    def read(self, record: bytes) -> Head:
        """Verify an encoded head and remember how far the run has come.

        Raises:
            RemoteProtocolError: the bytes are no head.
            TrustError: it is not signed by a key that may publish in this run, or not of this run.
        """
        signed = decode_signed(record)
        for signer in signed.signers:
            if not self._trust.may_publish(signer):
                raise TrustError("untrusted", f"head signed by {short(signer)}")
        head = self._trust.head
        if head is None or signed != self._trust.head_record:
            # Not ``Trust.accept_head``: that refuses expired heads and heads of epochs not fetched yet, and both count.
            head = open_record(Head, signed, self._verify, run_id=self._trust.run_id)
        self._read_signer = signed.signers[0]
        if self._newest is None or head.version > self._newest.version:
            self._newest, self._signer = head, signed.signers[0]
            self._is_contested = False
        elif head.version == self._newest.version and head.root != self._newest.root:
            self._is_contested = True
        return head

    def compare_at_start(self, state: PublishedState | None, started_ms: int) -> bool:
        """Say whether ``state`` is the newest of the run; if not, a new epoch is due."""
        newest = self.newest
        known = newest is None or judge_head(newest, state, started_ms) is Standing.KNOWN
        if known and not (self._is_contested and newest == self._newest):
            return True
        self.require_epoch("restart")
        return False

    def compare_later(self, head: Head, state: PublishedState | None, started_ms: int) -> Standing:
        """Take in the head read last, seen while publishing, and say what it means."""
        standing = judge_head(head, state, started_ms)
        if standing is Standing.FORMER:
            self.require_epoch("restart")
        elif standing is Standing.LIVE and self._read_signer is not None:
            self._rival = (head, self._read_signer)
        return standing

    def require_epoch(self, reason: str) -> None:
        """The next version must open a new epoch."""
        self._reason = self._reason or reason

    def fulfil(self) -> None:
        """A new version was committed, in a new epoch if one was due."""
        self._reason = ""
        self._rival = None if self.rival is None else self._rival

    def find_epoch_reason(self, state: PublishedState | None, table_digest: Digest) -> str:
        """Return why the next version must open a new epoch, or the empty string."""
        if self._reason:
            return self._reason
        if self._rival is not None and self.rival is None:
            return "revocation"
        if self._trust.fork is not None:
            return "fork"
        if self._trust.epoch > (0 if state is None else state.version.epoch):
            return "opened"
        if not self._trust.epoch_is_endorsed:
            return "endorsement"
        return "table" if state is not None and state.table_digest != table_digest else ""

    @property
    def may_open_epochs(self) -> bool:
        """Whether the keys held here suffice to open an epoch, and a key that leaked left a number to open it with."""
        number = max(self._trust.number_max, 0 if self.newest is None else self.newest.version.number)
        epoch = max(self._trust.epoch, 0 if self.newest is None else self.newest.version.epoch)
        return self._scribe.may_open_epochs and number < INTEGER_MAX and epoch < EPOCH_OF_AUTHORITIES_MAX

    def may_open(self, state: PublishedState | None) -> bool:
        """Whether a new epoch can be entered: an owner opened one that is empty, or the keys held here suffice."""
        return self._find_vacant_epoch(state) is not None or self.may_open_epochs

    def choose_version(self, state: PublishedState | None, reason: str) -> tuple[Version, SignedRecord | None]:
        """Return the next version and, if it lies in a new epoch (``reason``), the record that opens it."""
        if not reason:
            return (Version(0, 1) if state is None else Version(state.version.epoch, state.version.number + 1)), None
        vacant = self._find_vacant_epoch(state)
        if vacant is not None:
            record = self._trust.epoch_record
            assert record is not None
            known = [self._trust.number_max, *(version.number for version, _ in self._list_known(state))]
            return Version(record.epoch, max([*known, record.first_number - 1]) + 1), vacant
        return self.open_epoch(state, reason)

    def open_epoch(self, state: PublishedState | None, reason: str) -> tuple[Version, SignedRecord]:
        """Return the first version of an epoch above everything known, and the record that opens it."""
        known = self._list_known(state)
        number = max([self._trust.number_max, *(version.number for version, _ in known)]) + 1
        epoch = max([self._trust.epoch, *(version.epoch for version, _ in known)]) + 1
        kept_version, kept_root = max(known, key=lambda item: item[0], default=(None, None))
        signed = self._scribe.open_epoch(
            epoch=epoch, first_number=number, kept_version=kept_version, kept_root=kept_root, reason=reason
        )
        return Version(epoch, number), signed

    def _list_known(self, state: PublishedState | None) -> list[tuple[Version, Digest]]:
        newest = self.newest
        heard = [] if newest is None else [(newest.version, newest.root)]
        return heard if state is None else [*heard, (state.version, state.root)]

    def _find_vacant_epoch(self, state: PublishedState | None) -> SignedRecord | None:
        """Return the record of an epoch that was opened and in which nothing was published yet."""
        newest = self.newest
        used = max(
            0 if state is None else state.version.epoch,
            0 if newest is None else newest.version.epoch,
        )
        return self.find_open_epoch(used)

    def find_open_epoch(self, used: int) -> SignedRecord | None:
        """Return the record of the epoch in force, if it lies above the last ``used`` one and may be entered."""
        if self._trust.epoch <= used or self._trust.fork is not None or not self._trust.epoch_is_endorsed:
            return None
        return self._trust.epoch_records[-1]
