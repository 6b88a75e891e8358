"""What the scripted publisher signs passes the rules, unless it is told to lie."""

from __future__ import annotations

import pytest

from pulsenet.chain.signing import decode_signed
from pulsenet.errors import TrustError
from pulsenet.ids import Version
from pulsenet.testing.script import NOW_MS, ScriptedPublisher, break_signature, make_data, root_of


def test_a_scripted_chain_is_accepted_by_trust() -> None:
    publisher = ScriptedPublisher(authorities=["other"])
    digests = publisher.chain(5, 7)
    trust = publisher.make_trust()
    head = trust.accept_head(decode_signed(publisher.head(digests)), NOW_MS)
    assert (head.version, head.root) == (Version(0, 7), root_of(Version(0, 7)))
    trust.accept_catalogue(decode_signed(publisher.store.records[head.catalogue_digest]))
    for digest in digests:
        assert trust.accept_manifest(decode_signed(publisher.store.records[digest])) == publisher.manifests[digest]


def test_a_broken_signature_is_refused() -> None:
    publisher = ScriptedPublisher()
    head = publisher.head(publisher.chain(1, 1))
    with pytest.raises(TrustError, match="signature"):
        publisher.make_trust().accept_head(decode_signed(break_signature(head)), NOW_MS)


def test_revisions_and_epochs_are_accepted_in_order() -> None:
    publisher = ScriptedPublisher()
    trust = publisher.make_trust()
    trust.accept_descriptor(publisher.revise((publisher.peer_id,)))
    trust.accept_epoch(publisher.open_epoch(1, None, 4))
    assert (trust.epoch, trust.next_revision) == (1, 2)


def test_data_follows_from_its_name() -> None:
    assert make_data("a", 100) == make_data("a", 100) != make_data("b", 100)
    assert len(make_data("a", 0)) == 0
