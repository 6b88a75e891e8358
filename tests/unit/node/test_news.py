"""News of a run: fetched in the right order, judged, stored before use, and blamed on the right peer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet import limits
from pulsenet.chain.records import Kind
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import Count, Effect, Log, Release, SaveState, StoreRecord, StrikePeer
from pulsenet.node.news import (
    HEAD_KEY,
    LAST_HEAD_WAIT_SECONDS,
    NEWEST_KEPT,
    REFUSED_MAX,
    STASH_MAX,
    STASH_TRIES_MAX,
    TRUST_KEY,
    News,
)
from pulsenet.node.records_fetch import Need, RecordsArrived
from pulsenet.testing.fakes import FakeStore, make_key, verify
from pulsenet.testing.script import NOW_MS, VALIDITY_MS, ScriptedPublisher, break_signature, root_of
from pulsenet.wire.messages import GetDescriptors, GetEpochs, GetHead, GetRecords

PEER = PeerId(b"p" * 32)


class Desk:
    """News of one newcomer, answered from a scripted publisher's store."""

    def __init__(self, publisher: ScriptedPublisher, *, with_genesis: bool = True) -> None:
        self.publisher = publisher
        self.trust = publisher.make_trust(with_genesis=with_genesis)
        self.index = FakeStore()
        self.news = News(self.trust, self.index, lambda seconds: seconds)
        self.news.save_changes()

    def take_head(self, record: bytes, now_ms: int = NOW_MS) -> list[Effect]:
        return self.news.take_head(record, PEER, now_ms)

    def answer(self, need: Need, *records: bytes) -> list[Effect]:
        return self.news.take_records(RecordsArrived(need, PEER, records), 0.0, NOW_MS)

    def fetch(self, *digests: Digest) -> list[Effect]:
        """Answer every need once from the publisher's store."""
        effects: list[Effect] = []
        for need in self.news.needs(digests, 0.0):
            if isinstance(need, GetRecords):
                found = [self.publisher.store.records[digest] for digest in need.digests]
                effects += self.answer(need, *found)
            elif isinstance(need, GetDescriptors):
                effects += self.answer(need, *self.publisher.store.descriptors(need.revision_min))
            elif isinstance(need, GetEpochs):
                effects += self.answer(need, *self.publisher.store.epochs(need.epoch_min))
        return effects


def named(needs: dict[Need, PeerId | None]) -> list[Need]:
    return [need for need in needs if not isinstance(need, GetHead)]


@pytest.mark.parametrize("is_own", [False, True])
def test_heads_and_catalogues_of_long_ago_are_let_go(is_own: bool) -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    own = publisher.peer_id if is_own else None
    desk.news = News(desk.trust, desk.index, lambda seconds: seconds, own=own)
    digests = publisher.chain(1, 2)
    stored: set[Digest] = set()
    for count in range(20):
        desk.take_head(publisher.head(digests, at_ms=NOW_MS + count))
        desk.fetch()
        for effect in desk.news.save_changes():
            if isinstance(effect, StoreRecord):
                stored.add(record_digest(effect.record))
            elif isinstance(effect, Release):
                assert effect.blob_ids == ()
                stored -= set(effect.record_digests)
    head, catalogue = desk.trust.head_record, desk.trust.catalogue_record
    assert head is not None
    assert catalogue is not None
    assert {record_digest(head), record_digest(catalogue)} <= stored
    # 20 heads and their one catalogue were stored, which whoever made it keeps as long as it likes.
    assert len(stored) == NEWEST_KEPT + is_own


def test_a_head_leads_to_its_catalogue_and_then_to_manifests() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    desk = Desk(publisher)
    assert desk.take_head(publisher.head(digests)) == []
    assert desk.news.head is not None
    assert desk.news.catalogue is None
    assert named(desk.news.needs((), 0.0)) == [GetRecords((desk.news.head.catalogue_digest,))]
    assert desk.news.needs((), 0.0)[GetRecords((desk.news.head.catalogue_digest,))] == PEER
    desk.fetch()
    assert desk.news.catalogue is not None
    assert named(desk.news.needs(digests, 0.0)) == [GetRecords(tuple(digests))]
    effects = desk.fetch(*digests)
    assert [effect for effect in effects if not isinstance(effect, StoreRecord)] == []
    assert len(effects) == len(digests)
    assert all(desk.news.manifest(digest) == publisher.manifests[digest] for digest in digests)
    assert desk.news.signer(digests[0]) == publisher.peer_id
    assert desk.news.manifest_count == 3
    assert named(desk.news.needs(digests, 0.0)) == []


@pytest.mark.parametrize("is_accepted_before", [False, True])
def test_the_catalogue_is_asked_of_who_told_the_head(is_accepted_before: bool) -> None:
    """The mesh hears of every head first, and accepts it."""
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    digests = publisher.chain(1, 3)
    desk.news.take_head(publisher.head(digests[:2]), PeerId(b"o" * 32), NOW_MS)
    desk.fetch()
    head = publisher.head(digests)
    if is_accepted_before:
        desk.trust.accept_head(decode_signed(head), NOW_MS)
    desk.take_head(head)
    desk.news.take_head(head, PeerId(b"l" * 32), NOW_MS)
    assert desk.news.head is not None
    assert desk.news.needs((), 0.0)[GetRecords((desk.news.head.catalogue_digest,))] == PEER


def test_a_newcomer_with_a_token_asks_for_the_genesis_first() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher, with_genesis=False)
    head = publisher.head(publisher.chain(1, 2))
    assert named(desk.news.needs((), 0.0)) == [GetDescriptors(0)]
    assert desk.take_head(head) == []
    desk.fetch()
    assert desk.trust.descriptor is not None
    assert desk.news.head is not None


def test_what_changed_is_stored_and_saved_once() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    head = publisher.head(publisher.chain(1, 2))
    desk.take_head(head)
    effects = desk.news.save_changes()
    assert StoreRecord(decode_signed(head)) in effects
    assert SaveState(HEAD_KEY, head) in effects
    saved = [effect.value for effect in effects if isinstance(effect, SaveState) and effect.key == TRUST_KEY]
    assert Trust.restore(saved[0], publisher.run_id, verify).head == desk.trust.head
    assert desk.news.save_changes() == []


def test_manifests_are_limited_per_request() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    digests = [Digest(number.to_bytes(32, "big")) for number in range(limits.RECORDS_PER_REQUEST_MAX + 9)]
    (need,) = named(desk.news.needs(digests, 0.0))
    assert isinstance(need, GetRecords)
    assert need.digests == tuple(digests[: limits.RECORDS_PER_REQUEST_MAX])


def test_a_manifest_in_the_store_is_not_asked_for() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 11)
    desk = Desk(publisher)
    desk.index.records.update(publisher.store.records)
    assert named(desk.news.needs(digests, 0.0)) == []
    assert desk.news.known_manifest(digests[0]) == publisher.manifests[digests[0]]
    desk.news.keep_manifests(digests[1:])
    assert desk.news.known_manifest(digests[0]) is None
    assert desk.news.manifest(digests[0]) is not None


def test_a_damaged_record_in_the_store_is_fetched_again() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 10)
    desk = Desk(publisher)
    desk.index.records[digests[0]] = b"damaged"
    assert named(desk.news.needs(digests, 0.0)) == [GetRecords((digests[0],))]
    other = publisher.add(Kind.ANCHOR, None, Version(0, 11))
    desk.index.records[other] = publisher.store.records[digests[0]]
    assert desk.news.manifest(other) is None


def test_a_head_of_a_newer_revision_waits_for_the_descriptors() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    publisher.revise((publisher.peer_id,))
    publisher.revise((publisher.peer_id,))
    head = publisher.head(publisher.chain(1, 2))
    assert desk.take_head(head) == []
    assert desk.news.head is None
    assert desk.news.needs((), 0.0)[GetDescriptors(1)] == PEER
    desk.fetch()
    assert desk.news.head is not None
    assert desk.news.head.revision == 2


def test_a_head_of_a_key_admitted_since_waits_for_the_descriptors() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    late = make_key("late")
    digests = publisher.chain(1, 2)
    publisher.revise(tuple(sorted((publisher.peer_id, late))))
    assert desk.take_head(publisher.head(digests, signer=late)) == []
    desk.fetch()
    assert desk.news.head is not None


def test_a_head_of_an_unknown_key_is_refused() -> None:
    """A-AUTH-1: the mesh counts what was pushed; only the answer to our own question is counted here."""
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    head = publisher.head(publisher.chain(1, 2), signer=make_key("stranger"))
    assert desk.take_head(head) == []
    assert desk.news.head is None
    assert named(desk.news.needs((), 0.0)) == []
    assert desk.answer(GetHead(), head) == [Count("rejected", "untrusted")]


def test_a_head_of_an_unknown_epoch_waits_for_its_record() -> None:
    """A-CHAIN-4."""
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    desk.take_head(publisher.head(publisher.chain(1, 3)))
    publisher.open_epoch(1, Version(0, 2), 4)
    digest = publisher.add(Kind.ANCHOR, None, Version(1, 4), b"anchor")
    assert desk.take_head(publisher.head([digest])) == []
    assert desk.news.needs((), 0.0)[GetEpochs(1)] == PEER
    desk.fetch()
    assert desk.news.head is not None
    assert desk.news.head.version == Version(1, 4)


def test_a_head_that_nothing_brings_nearer_is_dropped_after_a_while() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    publisher.revise((publisher.peer_id,))
    desk.take_head(publisher.head(publisher.chain(1, 2)))
    for _ in range(STASH_TRIES_MAX):
        assert named(desk.news.needs((), 0.0)) == [GetDescriptors(1)]
        desk.answer(GetDescriptors(1))
    assert named(desk.news.needs((), 0.0)) == []


def test_waiting_heads_are_bounded() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    digests = publisher.chain(1, 2)
    publisher.revise((publisher.peer_id,))
    for number in range(STASH_MAX + 2):
        desk.take_head(publisher.head(digests, at_ms=NOW_MS + number))
    assert len(desk.news._stash) == STASH_MAX


@pytest.mark.parametrize("need", [GetDescriptors(1), GetEpochs(1)])
def test_a_foundation_with_a_broken_signature_costs_a_strike(need: Need) -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    signed = publisher.revise((publisher.peer_id,)) if isinstance(need, GetDescriptors) else None
    record = encode_signed(signed or publisher.open_epoch(1, None, 1))
    effects = desk.answer(need, break_signature(record))
    assert effects == [Count("rejected", "signature"), StrikePeer(PEER, "signature")]


def test_an_epoch_that_needs_descriptors_first_is_nobodys_fault() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    publisher.revise((publisher.peer_id,))
    record = encode_signed(publisher.open_epoch(1, None, 1))
    assert desk.answer(GetEpochs(1), record) == []


def test_a_manifest_with_a_broken_signature_costs_its_sender_a_strike_and_is_asked_again() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 10)
    desk = Desk(publisher)
    need = GetRecords(tuple(digests))
    effects = desk.answer(need, break_signature(publisher.store.records[digests[0]]))
    assert effects == [Count("rejected", "signature"), StrikePeer(PEER, "signature")]
    assert not desk.news.is_refused(digests[0])
    assert named(desk.news.needs(digests, 0.0)) == [need]


def test_a_manifest_of_a_former_authority_is_taken_once_a_catalogue_vouches_for_it() -> None:
    """It may arrive after its signer was revoked, and before the next authority's catalogue lists it."""
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 10)
    desk = Desk(publisher)
    former = encode_signed(publisher.sign(publisher.manifests[digests[0]], make_key("former authority")))
    need = GetRecords(tuple(digests))
    assert desk.answer(need, former) == [Count("rejected", "untrusted")]
    desk.take_head(publisher.head(digests))
    desk.fetch()
    assert not desk.news.is_refused(digests[0])
    assert desk.answer(need, former) == [StoreRecord(decode_signed(former))]


def test_a_manifest_its_catalogue_contradicts_is_refused_for_good() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 11)
    desk = Desk(publisher)
    lying = publisher.manifests[digests[0]]
    other = publisher.add(Kind.ANCHOR, None, Version(0, 10), b"another anchor")
    publisher.manifests[other] = lying
    desk.take_head(publisher.head([other, digests[1]]))
    desk.fetch()
    effects = desk.answer(GetRecords((other,)), publisher.store.records[other])
    assert effects == [Count("rejected", "mismatch")]
    assert desk.news.is_refused(other)
    assert named(desk.news.needs([other], 0.0)) == []


def test_a_record_nobody_asked_for_costs_a_strike() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 11)
    desk = Desk(publisher)
    effects = desk.answer(GetRecords((digests[0],)), publisher.store.records[digests[1]])
    assert effects == [StrikePeer(PEER, "unexpected"), Count("rejected", "unexpected")]
    effects = desk.answer(GetRecords((digests[0],)), b"junk")
    assert StrikePeer(PEER, "schema") in effects


def test_a_catalogue_overtaken_by_a_newer_head_is_nobodys_fault() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    desk = Desk(publisher)
    desk.take_head(publisher.head(digests[:2]))
    (need,) = named(desk.news.needs((), 0.0))
    assert isinstance(need, GetRecords)
    desk.take_head(publisher.head(digests))
    assert desk.answer(need, publisher.store.records[need.digests[0]]) == []
    assert desk.news.catalogue is None


def test_a_catalogue_that_contradicts_its_head_is_refused() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    desk = Desk(publisher)
    publisher.manifests[digests[-1]] = publisher.manifests[digests[1]]
    head = publisher.head([digests[0], digests[-1]])
    publisher.manifests.pop(digests[0])
    desk.take_head(head)
    need = named(desk.news.needs((), 0.0))[0]
    assert isinstance(need, GetRecords)
    record = break_signature(publisher.store.records[need.digests[0]])
    assert Count("rejected", "signature") in desk.answer(need, record)


def test_an_older_head_is_no_news_and_no_offence() -> None:
    """A-CHAIN-6."""
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    desk = Desk(publisher)
    old = publisher.head(digests[:2])
    desk.take_head(publisher.head(digests))
    assert desk.answer(GetHead(), old) == []
    assert desk.news.head is not None
    assert desk.news.head.version == Version(0, 12)


def test_the_head_is_asked_for_at_once_then_rarely_and_sooner_when_stale() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    assert GetHead() in desk.news.needs((), 0.0)
    desk.answer(GetHead())
    assert desk.news.next_wake(0.0) == 5.0
    assert GetHead() not in desk.news.needs((), 4.9)
    desk.news.ask_head(PEER, 4.9)
    assert desk.news.needs((), 4.9)[GetHead()] == PEER
    desk.answer(GetHead(), publisher.head(publisher.chain(1, 2)))
    assert desk.news.next_wake(0.0) == limits.HEAD_RESIGN_SECONDS
    assert desk.news.next_wake(1000.0) is None


def test_two_roots_for_one_version_are_a_fork_told_once() -> None:
    """A-AUTH-3, A-CHAIN-4."""
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    digests = publisher.chain(10, 11)
    desk.take_head(publisher.head(digests))
    other = publisher.add(Kind.PATCH, Version(0, 10), Version(0, 11), b"other", root=Digest(b"o" * 32))
    desk.take_head(publisher.head([digests[0], other], at_ms=NOW_MS + 1))
    assert desk.trust.fork is not None
    assert desk.news.head is None
    effects = desk.news.save_changes()
    assert Count("rejected", "fork") in effects
    assert [effect.level for effect in effects if isinstance(effect, Log)] == ["error"]
    assert desk.news.save_changes() == []


def test_a_fork_proof_is_believed_and_a_false_one_is_not() -> None:
    publisher = ScriptedPublisher()
    first = publisher.add(Kind.ANCHOR, None, Version(0, 3), b"a")
    second = publisher.add(Kind.ANCHOR, None, Version(0, 3), b"b", root=Digest(b"o" * 32))
    same = publisher.add(Kind.ANCHOR, None, Version(0, 3), b"c", root=root_of(Version(0, 3)))
    records = publisher.store.records
    desk = Desk(publisher)
    desk.news.take_fork_proof(records[first], records[same])
    desk.news.take_fork_proof(records[first], b"junk")
    assert desk.trust.fork is None
    desk.news.take_fork_proof(records[first], records[second])
    assert desk.trust.fork is not None


def test_an_expired_head_is_not_followed() -> None:
    """A-AUTH-5."""
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    assert desk.take_head(publisher.head(publisher.chain(1, 2)), now_ms=NOW_MS + VALIDITY_MS) == []
    assert desk.news.head is None
    assert record_digest(publisher.genesis) == publisher.run_id


def test_manifests_of_a_false_signer_are_remembered_within_bounds() -> None:
    desk = Desk(ScriptedPublisher())
    for number in range(REFUSED_MAX + 5):
        desk.news.refuse(Digest(number.to_bytes(32, "big")))
    assert not desk.news.is_refused(Digest(bytes(32)))
    assert desk.news.is_refused(Digest((REFUSED_MAX + 4).to_bytes(32, "big")))


def test_a_manifest_that_is_known_to_be_false_is_not_read_again() -> None:
    publisher = ScriptedPublisher()
    (digest,) = publisher.chain(10, 10)
    desk = Desk(publisher)
    desk.index.records.update(publisher.store.records)
    desk.news.refuse(digest)
    assert desk.news.manifest(digest) is None
    assert desk.news.known_manifest(digest) is None


def test_a_junk_head_is_no_reason_to_ask_for_descriptors() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    assert desk.take_head(b"junk") == []
    wrong = encode_signed(publisher.sign(publisher.descriptor, make_key("stranger")))
    assert desk.take_head(wrong) == []
    assert named(desk.news.needs((), 0.0)) == []


class TestLastHeads:
    """The publisher is away for longer than its head is valid; others hold what it published."""

    LATER_MS = NOW_MS + 10 * VALIDITY_MS
    PEERS = tuple(PeerId(bytes([index]) * 32) for index in range(30))

    def ask(self, desk: Desk, peer: int, record: bytes, now: float = 0.0) -> list[Effect]:
        arrived = RecordsArrived(GetHead(), self.PEERS[peer], (record,))
        return [effect for effect in desk.news.take_records(arrived, now, self.LATER_MS) if isinstance(effect, Log)]

    def test_the_newest_of_two_peers_heads_is_believed_aloud_and_stale(self) -> None:
        """A-AUTH-7: the first answer alone is not relied on."""
        publisher = ScriptedPublisher()
        digests = publisher.chain(10, 12)
        desk = Desk(publisher)
        assert self.ask(desk, 0, publisher.head(digests[:2])) == []
        assert desk.news.head is None
        assert self.ask(desk, 0, publisher.head(digests[:2]), 5.0) == []
        (log,) = self.ask(desk, 1, publisher.head(digests), 10.0)
        assert "version 0.12, the newest that 2 of them held; stale" in log.text
        assert desk.news.head is not None
        assert desk.trust.stale(self.LATER_MS)
        assert desk.news.needs((), 10.0)[GetRecords((desk.news.head.catalogue_digest,))] == self.PEERS[1]
        assert self.ask(desk, 2, publisher.head(digests), 15.0) == []

    def test_the_only_peer_is_believed_after_a_minute(self) -> None:
        publisher = ScriptedPublisher()
        head = publisher.head(publisher.chain(10, 12))
        desk = Desk(publisher)
        assert self.ask(desk, 0, head, 100.0) == []
        assert self.ask(desk, 0, head, 100.0 + LAST_HEAD_WAIT_SECONDS - 0.1) == []
        assert len(self.ask(desk, 0, head, 100.0 + LAST_HEAD_WAIT_SECONDS)) == 1
        assert desk.news.head is not None

    def test_forged_heads_are_passed_over(self) -> None:
        publisher = ScriptedPublisher()
        digests = publisher.chain(10, 12)
        desk = Desk(publisher)
        self.ask(desk, 0, publisher.head(digests[:2]))
        assert len(self.ask(desk, 1, break_signature(publisher.head(digests)))) == 1
        assert desk.news.head is not None
        assert desk.news.head.version == Version(0, 11)

    def test_junk_from_many_is_bounded(self) -> None:
        publisher = ScriptedPublisher()
        desk = Desk(publisher)
        for peer in self.PEERS:
            assert self.ask(desk, peer[0], b"junk") == []
            assert self.ask(desk, peer[0], break_signature(publisher.head(publisher.chain(10, 11)))) == []
        assert desk.news.head is None

    def test_a_valid_head_ends_it(self) -> None:
        publisher = ScriptedPublisher()
        digests = publisher.chain(10, 12)
        desk = Desk(publisher)
        self.ask(desk, 0, publisher.head(digests[:2]))
        desk.take_head(publisher.head(digests, at_ms=self.LATER_MS), self.LATER_MS)
        assert self.ask(desk, 1, publisher.head(digests[:2])) == []
        assert desk.news.head is not None
        assert desk.news.head.version == Version(0, 12)
        assert not desk.trust.stale(self.LATER_MS)


def test_a_strangers_head_that_cannot_be_read_is_no_reason_to_ask_for_descriptors() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    stranger = make_key("stranger")
    signed = decode_signed(publisher.head(publisher.chain(1, 1)))
    record = encode_signed(replace(signed, signers=(stranger,), payload=b"rubbish"))
    effects = desk.news.take_head(record, PEER, NOW_MS, is_ours=True)
    assert Count("rejected", "untrusted") in effects
    assert GetDescriptors(1) not in desk.news.needs((), 0.0)
