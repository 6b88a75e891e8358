"""What the owners said, at this node: learned from the run's directory and from peers, kept, passed on.

That is descriptor revisions, and epochs that the owners themselves opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pulsenet.chain.floor import is_owners_word
from pulsenet.chain.records import Descriptor, EpochRecord, SignedRecord
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.wire.messages import GetDescriptors, GetEpochs, RecordsReply
from pulsenet.wire.schema import decode_value
from pulsenetd import runs
from pulsenetd.logs import logger
from pulsenetd.network.streams import PeerRefusedError
from pulsenetd.storage.store import Store

Ask = Callable[[PeerId, GetDescriptors | GetEpochs], Awaitable[RecordsReply]]


class Membership:
    """Keeps trust, store and the run's directory at the same revision.

    Args:
        run_path: The run's directory; ``pulsenet run admit`` and its like write there.
        on_change: Told of each newer descriptor.
    """

    def __init__(
        self, run_path: Path, store: Store, trust: Trust, on_change: Callable[[Descriptor], None] = lambda _: None
    ) -> None:
        self._run_path = run_path
        self._store = store
        self._trust = trust
        self._on_change = on_change
        self._encoded: tuple[bytes, ...] = ()
        self._told_revision = -1
        self._last_refusal = ""
        self.is_refused = False
        """Whether the last peer asked serves members only, and this node is none."""

    def encoded(self) -> Sequence[bytes]:
        """Return every revision held, from the genesis on, without a gap."""
        return self._encoded

    def refresh(self) -> None:
        """Take what the run's directory and the store have that is news. Blocks on the disk."""
        in_directory = _by_revision(runs.load_descriptors(self._run_path))
        stored = _by_revision(decode_signed(record) for record in self._store.records_of_type(Descriptor.TYPE))
        # What is stored was accepted; a revision of the directory may still lack signatures.
        known = in_directory | stored
        for revision in sorted(known):
            if revision >= self._trust.next_revision and not self._accept(known[revision]):
                break
        newest, record = self._trust.descriptor, self._trust.descriptor_record
        if newest is None or record is None:
            return
        for signed in runs.load_epochs(self._run_path):
            self._take_epoch(signed)
        if newest.revision == self._told_revision:
            self._write_back(newest.revision, record, in_directory)
            return
        self._keep(known | {newest.revision: record}, in_directory)
        self._told_revision = newest.revision
        self._on_change(newest)

    async def ask(self, peer_id: PeerId, ask: Ask) -> bool:
        """Ask a peer for newer revisions, and epochs that the owners opened; return whether any came."""
        taken = await self._ask_descriptors(peer_id, ask)
        if self._trust.descriptor is None or self.is_refused:
            return taken
        return await self._ask_epochs(peer_id, ask) or taken

    async def _ask_epochs(self, peer_id: PeerId, ask: Ask) -> bool:
        """Only what owners signed: other epochs come with the heads that name them, to the machine that may judge."""
        try:
            reply = await ask(peer_id, GetEpochs(self._trust.epoch + 1))
            epochs = [decode_signed(record) for record in reply.records]
            taken = [await asyncio.to_thread(self._take_epoch, signed) for signed in epochs]
        except (UnavailableError, RemoteProtocolError) as error:
            logger.debug("no epochs: %s", error)
            return False
        return any(taken)

    def _take_epoch(self, signed: SignedRecord) -> bool:
        """Take an epoch record that enough owners signed; return whether it is news. Blocks on the disk."""
        descriptor = self._trust.descriptor
        if descriptor is None or signed.type != EpochRecord.TYPE or not is_owners_word(descriptor, signed.signers):
            return False  # of authorities, or still waiting for other owners
        if decode_value(EpochRecord, signed.payload).epoch <= self._trust.epoch:
            return False
        try:
            record = self._trust.accept_epoch(signed)
        except (RemoteProtocolError, TrustError) as error:
            self._tell_refusal(f"an epoch of the owners was not accepted: {error}")
            return False
        logger.warning("the run's owners opened epoch %d: it goes on at number %d", record.epoch, record.first_number)
        self._store.put_record(signed)
        runs.save_epoch(self._run_path, signed)
        return True

    async def _ask_descriptors(self, peer_id: PeerId, ask: Ask) -> bool:
        try:
            reply = await ask(peer_id, GetDescriptors(self._trust.next_revision))
        except (UnavailableError, RemoteProtocolError) as error:
            self.is_refused = isinstance(error, PeerRefusedError) and error.refusal.code == "not-admitted"
            logger.debug("no descriptors: %s", error)
            return False
        self.is_refused = False
        taken = False
        for record in reply.records:
            try:
                signed = decode_signed(record)
            except RemoteProtocolError:
                return taken
            due = self._trust.next_revision
            if not self._accept(signed):
                return taken
            if self._trust.next_revision > due:
                await asyncio.to_thread(self._store.put_record, signed)
                taken = True
        return taken

    def _accept(self, signed: SignedRecord) -> bool:
        try:
            self._trust.accept_descriptor(signed)
        except (RemoteProtocolError, TrustError) as error:
            self._tell_refusal(f"a descriptor revision was not accepted: {error}")
            return False
        return True

    def _tell_refusal(self, text: str) -> None:
        """Say it once: a revision that still lacks an owner's signature is looked at again and again."""
        if text != self._last_refusal:
            logger.warning("%s", text)
        self._last_refusal = text

    def _write_back(self, revision: int, record: SignedRecord, in_directory: Mapping[int, SignedRecord]) -> None:
        """Keep the owner, who signs the next revision there, from signing another one of this number."""
        found = in_directory.get(revision)
        is_there = found is not None and record_digest(found) == record_digest(record)
        if in_directory and not is_there:
            logger.warning("revision %d is believed here already and is written back to the run's directory", revision)
            runs.save_descriptor(self._run_path, record)

    def _keep(self, accepted: Mapping[int, SignedRecord], in_directory: Mapping[int, SignedRecord]) -> None:
        """Write each revision where it is missing, and remember the unbroken chain for peers."""
        chain: list[bytes] = []
        while len(chain) in accepted and len(chain) < self._trust.next_revision:
            signed = accepted[len(chain)]
            if in_directory.get(len(chain)) != signed:
                runs.save_descriptor(self._run_path, signed)
            self._store.put_record(signed)
            chain.append(encode_signed(signed))
        self._encoded = tuple(chain)


def _by_revision(records: Iterable[SignedRecord]) -> dict[int, SignedRecord]:
    return {decode_value(Descriptor, signed.payload).revision: signed for signed in records}
