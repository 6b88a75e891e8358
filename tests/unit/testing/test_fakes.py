"""The stand-ins behave like what they stand for, the same way every time."""

from __future__ import annotations

from pulsenet.chain.records import Kind
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.ids import Version
from pulsenet.node.published import HEAD_KEY
from pulsenet.testing.fakes import Chance, FakeDirectory, FakeStore, make_key, make_sign, verify
from pulsenet.testing.script import ScriptedPublisher, make_data


def test_chance_repeats_by_seed_and_stays_in_range() -> None:
    first, second = Chance(7), Chance(7)
    drawn = [first(10) for _ in range(1000)]
    assert drawn == [second(10) for _ in range(1000)]
    assert set(drawn) == set(range(10))
    assert [Chance(8)(1 << 60) for _ in range(3)] != [Chance(7)(1 << 60) for _ in range(3)]
    assert all(1.0 <= first.between(1.0, 2.0) <= 2.0 for _ in range(100))
    assert 150 < sum(first.happens(200) for _ in range(1000)) < 250
    assert not any(first.happens(0) for _ in range(100))


def test_a_fork_of_chance_does_not_shift_with_its_parents_later_draws() -> None:
    parent, other = Chance(7), Chance(7)
    child, same = parent.fork(), other.fork()
    parent(10)
    assert [child(100) for _ in range(5)] == [same(100) for _ in range(5)]


def test_signatures_bind_key_and_message() -> None:
    alice, bob = make_key("alice"), make_key("bob")
    signature = make_sign(alice)(b"message")
    assert len(signature) == 64
    assert verify(alice, b"message", signature)
    assert not verify(bob, b"message", signature)
    assert not verify(alice, b"other", signature)


def test_a_store_knows_its_whole_blobs() -> None:
    publisher = ScriptedPublisher()
    digest = publisher.add(Kind.ANCHOR, None, Version(0, 1), make_data("a", 200))
    store = publisher.store
    manifest = publisher.manifests[digest]
    assert store.manifests() == {digest: manifest}
    assert b"".join(store.read_blob(manifest.blob_id)) == make_data("a", 200)
    chunk = next(iter(store.chunks))
    assert store.has_chunk(chunk)
    assert store.chunk(chunk) == store.chunks.pop(chunk)
    assert not store.has_chunk(chunk)
    assert store.manifests() == {}
    assert not FakeStore().holds_blob(manifest.blob_id)


def test_releasing_a_blob_keeps_chunks_that_others_use() -> None:
    publisher = ScriptedPublisher()
    first = publisher.add(Kind.ANCHOR, None, Version(0, 1), make_data("same", 64) + b"one")
    second = publisher.add(Kind.ANCHOR, None, Version(0, 2), make_data("same", 64) + b"two")
    store = publisher.store
    store.release((publisher.manifests[first].blob_id,), (first,))
    assert set(store.manifests()) == {second}
    assert len(store.chunks) == 2
    assert store.record(first) is None
    store.release((publisher.manifests[first].blob_id,), (first,))
    assert len(store.chunks) == 2


def test_descriptors_and_epochs_are_served_in_order_from_a_number() -> None:
    publisher = ScriptedPublisher()
    second = publisher.revise((publisher.peer_id,))
    epoch = publisher.open_epoch(1, None, 1)
    store = publisher.store
    assert list(store.descriptors(0)) == [encode_signed(publisher.genesis), encode_signed(second)]
    assert list(store.descriptors(1)) == [encode_signed(second)]
    assert list(store.epochs(0)) == [encode_signed(epoch)]
    assert list(store.epochs(2)) == []
    assert store.record(record_digest(epoch)) == encode_signed(epoch)
    assert store.newest_head() is None
    store.state[HEAD_KEY] = b"head"
    assert store.newest_head() == b"head"


def test_the_directory_keeps_the_newest_record_of_each_signer() -> None:
    publisher = ScriptedPublisher()
    directory = FakeDirectory()
    directory.put(directory.heads, publisher.genesis)
    newer = publisher.revise((publisher.peer_id,))
    directory.put(directory.heads, newer)
    assert directory.heads == {publisher.owner: encode_signed(newer)}
