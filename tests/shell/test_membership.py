"""Descriptor revisions: learned from the run's directory and from peers, kept, and passed on without a gap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Descriptor, EpochRecord, SignedRecord
from pulsenet.chain.signing import decode_signed, encode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.wire.messages import GetDescriptors, GetEpochs, RecordsReply
from pulsenet.wire.schema import decode_value
from pulsenetd import runs
from pulsenetd.identity import verify
from pulsenetd.membership import Membership
from pulsenetd.storage.store import Store

PEER = PeerId(b"p" * 32)


class Node:
    """The membership of one node of the run, and what it was told."""

    def __init__(self, directory: Path, store: Store, run: Any) -> None:
        self.directory, self.store, self.run = directory, store, run
        self.open()

    def open(self) -> None:
        self.told: list[int] = []
        self.trust = Trust(self.run.run_id, verify)
        self.membership = Membership(
            self.directory, self.store, self.trust, lambda descriptor: self.told.append(descriptor.revision)
        )

    def put(self, *revisions: SignedRecord) -> None:
        for signed in revisions:
            runs.save_descriptor(self.directory, signed)

    def ask(self, *records: bytes, epochs: Sequence[bytes] = ()) -> bool:
        async def answer(peer_id: PeerId, request: GetDescriptors | GetEpochs) -> RecordsReply:
            if isinstance(request, GetEpochs):
                self.asked_epoch = request.epoch_min
                return RecordsReply(tuple(epochs))
            self.asked = request.revision_min
            return RecordsReply(records)

        return asyncio.run(self.membership.ask(PEER, answer))

    @property
    def revision(self) -> int | None:
        return None if self.trust.descriptor is None else self.trust.descriptor.revision

    def in_directory(self) -> list[SignedRecord]:
        return runs.load_descriptors(self.directory)


@pytest.fixture
def node(tmp_path: Path, store: Store, run: Any) -> Node:
    return Node(tmp_path / "run", store, run)


def make_chain(run: Any, count: int) -> list[SignedRecord]:
    """Revisions 0 to ``count`` - 1, each admitting nobody new."""
    chain = [run.genesis]
    descriptor = run.descriptor
    while len(chain) < count:
        chain.append(run.revise(chain[-1], descriptor, open_inferencers_max=len(chain)))
        descriptor = decode_value(Descriptor, chain[-1].payload)
    return chain


def check_for_newcomer(run: Any, served: Any) -> int:
    """Walk what a node serves as a newcomer does; return the revision it ends at."""
    trust = Trust(run.run_id, verify)
    for record in served:
        trust.accept_descriptor(decode_signed(record))
    assert trust.descriptor is not None
    return trust.descriptor.revision


def test_revisions_of_the_directory_are_accepted_kept_and_told_once(node: Node, run: Any, store: Store) -> None:
    chain = make_chain(run, 3)
    node.put(*chain[:2])
    node.membership.refresh()
    node.membership.refresh()
    assert (node.revision, node.told) == (1, [1])
    node.put(chain[2])
    node.membership.refresh()
    assert (node.revision, node.told) == (2, [1, 2])
    assert list(node.membership.encoded()) == [encode_signed(signed) for signed in chain]
    assert sorted(store.records_of_type(Descriptor.TYPE)) == sorted(encode_signed(signed) for signed in chain)


def test_a_believed_revision_that_is_taken_out_of_the_directory_is_written_back(
    node: Node, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner would sign another one of its number there, and every node refuses one of the two."""
    chain = make_chain(run, 2)
    other = run.revise(chain[0], run.descriptor, open_inferencers_max=9)
    node.put(*chain)
    node.membership.refresh()
    newest = node.directory / "descriptors" / "000001.record"
    for change in (newest.unlink, lambda: node.put(other)):
        change()
        with caplog.at_level("WARNING", "pulsenet"):
            node.membership.refresh()
        assert node.in_directory() == chain
        assert caplog.text.count("revision 1 is believed here already") == 1
        caplog.clear()
    assert node.told == [1]


def test_a_directory_that_is_being_removed_is_not_made_again(node: Node, run: Any) -> None:
    node.put(*make_chain(run, 2))
    node.membership.refresh()
    for path in (node.directory / "descriptors").iterdir():
        path.unlink()
    (node.directory / "descriptors").rmdir()
    node.membership.refresh()
    assert not (node.directory / "descriptors").exists()


def test_nothing_is_known_before_the_genesis(node: Node) -> None:
    node.membership.refresh()
    assert (node.revision, node.told, list(node.membership.encoded())) == (None, [], [])


def test_a_revision_beyond_a_gap_waits_for_the_ones_between(node: Node, run: Any) -> None:
    chain = make_chain(run, 3)
    node.put(chain[0], chain[2])
    node.membership.refresh()
    assert node.revision == 0
    assert list(node.membership.encoded()) == [encode_signed(chain[0])]
    node.put(chain[1])
    node.membership.refresh()
    assert node.revision == 2
    assert check_for_newcomer(run, node.membership.encoded()) == 2


def test_revisions_of_a_peer_are_kept_and_reach_the_directory(node: Node, run: Any) -> None:
    chain = make_chain(run, 3)
    assert node.ask(*(encode_signed(signed) for signed in chain[:2]))
    assert node.asked == 0
    assert node.ask(encode_signed(chain[2]))
    assert node.asked == 2
    node.membership.refresh()
    assert node.told == [2]
    assert node.in_directory() == chain
    assert check_for_newcomer(run, node.membership.encoded()) == 2


def test_a_slow_disk_does_not_hold_the_loop_up(node: Node, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_record, threads = node.store.put_record, []

    def note_thread(signed: SignedRecord) -> Any:
        threads.append(threading.current_thread())
        return put_record(signed)

    monkeypatch.setattr(node.store, "put_record", note_thread)
    assert node.ask(encode_signed(run.genesis))
    assert node.ask(epochs=[encode_signed(open_epoch(run, 2))])
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_everything_is_still_known_after_a_restart(node: Node, run: Any, tmp_path: Path) -> None:
    node.ask(*(encode_signed(signed) for signed in make_chain(run, 3)))
    node.membership.refresh()
    node.directory = tmp_path / "another machine's view"
    node.open()
    node.membership.refresh()
    assert (node.revision, node.told) == (2, [2])
    assert node.in_directory() == make_chain(run, 3)


def test_a_peer_that_repeats_what_is_known_brings_nothing(node: Node, run: Any) -> None:
    """Or a node at its start would ask such a peer for ever."""
    genesis = encode_signed(run.genesis)
    assert node.ask(genesis)
    assert not node.ask(genesis)
    assert not node.ask(genesis, genesis)
    assert not node.ask()


def test_what_follows_a_bad_record_of_a_peer_is_not_looked_at(node: Node, run: Any) -> None:
    chain = make_chain(run, 3)
    assert node.ask(encode_signed(chain[0]), b"\xc1 no record", encode_signed(chain[1]))
    assert node.revision == 0
    forged = run.revise(chain[0], run.descriptor, run.stranger, private=True)
    assert not node.ask(encode_signed(forged), encode_signed(chain[1]))
    assert node.revision == 0
    assert not node.ask(run.signed_batch(1))
    assert node.store.records_of_type("rollouts") == []


@pytest.mark.parametrize("error", [UnavailableError("gone"), RemoteProtocolError("framing", "cut")])
async def test_a_peer_that_cannot_answer_brings_nothing(node: Node, error: Exception) -> None:
    async def fail(peer_id: PeerId, request: GetDescriptors) -> RecordsReply:
        raise error

    assert not await node.membership.ask(PEER, fail)


# Several owners


def shared_run(make_run: Any) -> Any:
    """A run whose revisions two owners sign."""
    run = make_run()
    owners = tuple(sorted((run.owner.peer_id, run.second.peer_id)))
    shared = type(run)(run.directory, owners=owners, owner_threshold=2)
    shared.genesis = shared.sign(shared.descriptor, shared.owner, shared.second)
    return shared


def test_a_revision_that_lacks_an_owner_waits_and_is_told_once(
    make_run: Any, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run = shared_run(make_run)
    node = Node(tmp_path / "run", store, run)
    incomplete = run.revise(run.genesis, run.descriptor, run.owner, private=True)
    node.put(run.genesis, incomplete)
    for _ in range(3):
        node.membership.refresh()
    assert node.revision == 0
    assert caplog.text.count("not accepted") == 1
    assert check_for_newcomer(run, node.membership.encoded()) == 0
    node.put(run.revise(run.genesis, run.descriptor, run.owner, run.second, private=True))
    node.membership.refresh()
    assert node.revision == 1
    assert check_for_newcomer(run, node.membership.encoded()) == 1


def test_the_signatures_of_peers_replace_an_incomplete_revision_of_the_directory(
    make_run: Any, tmp_path: Path, store: Store
) -> None:
    """One owner signs here, the other elsewhere: what newcomers are served must hold, and so must the directory."""
    run = shared_run(make_run)
    node = Node(tmp_path / "run", store, run)
    node.put(run.genesis, run.revise(run.genesis, run.descriptor, run.owner, private=True))
    node.membership.refresh()
    complete = run.revise(run.genesis, run.descriptor, run.owner, run.second, private=True)
    assert node.ask(encode_signed(complete))
    node.membership.refresh()
    first = decode_value(Descriptor, complete.payload)
    second = run.revise(complete, first, run.owner, run.second, open_inferencers_max=3)
    assert node.ask(encode_signed(second))
    node.membership.refresh()
    assert check_for_newcomer(run, node.membership.encoded()) == 2
    assert node.in_directory() == [run.genesis, complete, second]


def test_a_revision_of_the_directory_that_lost_to_another_is_replaced(
    make_run: Any, tmp_path: Path, store: Store
) -> None:
    run = shared_run(make_run)
    node = Node(tmp_path / "run", store, run)
    node.put(run.genesis, run.revise(run.genesis, run.descriptor, run.owner, open_inferencers_max=9))
    other = run.revise(run.genesis, run.descriptor, run.owner, run.second, private=True)
    assert node.ask(encode_signed(run.genesis), encode_signed(other))
    node.membership.refresh()
    assert node.in_directory() == [run.genesis, other]
    assert check_for_newcomer(run, node.membership.encoded()) == 1


def test_a_file_of_the_directory_that_is_no_descriptor_is_named(node: Node, run: Any) -> None:
    node.put(run.genesis)
    path = node.directory / "descriptors" / "000001.record"
    path.write_bytes(encode_signed(run.news(1).manifest))
    with pytest.raises(StorageError, match=r"000001\.record is damaged"):
        node.membership.refresh()


# Epochs that the owners opened


def open_epoch(run: Any, epoch: int, *signers: Any) -> SignedRecord:
    record = EpochRecord(run.run_id, 0, epoch, None, None, 58, "owners")
    signed: SignedRecord = run.sign(record, *(signers or (run.owner,)))
    return signed


def test_an_epoch_of_the_directory_is_taken_once_and_kept(
    node: Node, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node.put(run.genesis)
    signed = open_epoch(run, 1)
    runs.save_epoch(node.directory, signed)
    node.membership.refresh()
    node.membership.refresh()
    assert node.trust.epoch == 1
    assert [record.getMessage() for record in caplog.records].count(
        "the run's owners opened epoch 1: it goes on at number 58"
    ) == 1
    node.open()
    node.membership.refresh()
    assert node.trust.epoch == 1


def test_an_epoch_of_the_owners_comes_from_peers_and_reaches_the_directory(node: Node, run: Any) -> None:
    node.put(run.genesis)
    node.membership.refresh()
    signed = open_epoch(run, 2)
    assert node.ask(epochs=[encode_signed(signed)])
    assert (node.asked_epoch, node.trust.epoch) == (1, 2)
    assert runs.load_epochs(node.directory) == [signed]
    assert not node.ask(epochs=[encode_signed(signed)])
    assert node.asked_epoch == 3


def test_epochs_of_others_are_left_to_the_machines_that_may_judge(node: Node, run: Any) -> None:
    node.put(run.genesis)
    node.membership.refresh()
    by_authorities = open_epoch(run, 1, run.publisher, run.second)
    by_strangers = open_epoch(run, 1, run.stranger)
    assert not node.ask(epochs=[encode_signed(by_authorities), encode_signed(by_strangers), encode_signed(run.genesis)])
    assert not node.ask(epochs=[b"junk"])
    assert node.trust.epoch == 0
    assert runs.load_epochs(node.directory) == []


def test_an_epoch_that_contradicts_what_is_known_is_told_once(
    node: Node, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node.put(run.genesis)
    node.membership.refresh()
    node.trust.accept_head(run.news(70).head, run.now_ms)
    runs.save_epoch(node.directory, open_epoch(run, 1))
    node.membership.refresh()
    node.membership.refresh()
    assert node.trust.epoch == 0
    assert sum("an epoch of the owners was not accepted" in text for text in caplog.messages) == 1
