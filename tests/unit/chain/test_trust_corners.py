"""Corners of the gate: where two rules meet, on the last instant that counts, and what outlives what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.records import Catalogue, Have
from pulsenet.chain.signing import record_digest
from pulsenet.chain.trust import Trust, entry_of
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, Version, compute_digest


def digest(text: str) -> Digest:
    return compute_digest(text.encode())


def code_of(trust: Trust, call: Callable[[], object]) -> str:
    """Return the code of a refusal, which changes nothing."""
    before = trust.save()
    with pytest.raises(TrustError) as caught:
        call()
    assert trust.save() == before
    return caught.value.code


def fork_of(call: Callable[[], object]) -> None:
    with pytest.raises(TrustError) as caught:
        call()
    assert caught.value.code == "fork"


@pytest.fixture
def trust(run: Any) -> Trust:
    return run.trust()


def publish(run: Any, trust: Trust, *manifests: Any, signer: Any = None, epoch: int = 0, **changes: Any) -> Any:
    """Let a head and its catalogue be believed, the catalogue signed by ``signer``; return the signed catalogue."""
    newest = manifests[-1]
    catalogue = run.sign(run.catalogue(*manifests, epoch=epoch), signer or run.publisher)
    digests = {
        "manifest_digest": record_digest(run.sign(newest, run.publisher)),
        "catalogue_digest": record_digest(catalogue),
    }
    head = run.head(newest.version.number, epoch=epoch, root=newest.root, **digests, **changes)
    trust.accept_head(run.sign(head, run.publisher), run.now_ms)
    assert trust.accept_catalogue(catalogue) == trust.catalogue
    return catalogue


class TestRevisions:
    def test_the_newest_revision_comes_back_and_leaves_a_catalogue_of_keys_that_stay(
        self, run: Any, trust: Trust
    ) -> None:
        catalogue = publish(run, trust, run.manifest(1))
        revision = run.revise(run.genesis, run.descriptor, name="renamed")
        assert trust.accept_descriptor(revision) == trust.descriptor
        assert trust.catalogue_record == catalogue

    @pytest.mark.parametrize("revoked", ["publisher", "second"])
    def test_a_catalogue_goes_with_its_signer_and_with_that_of_its_head(
        self, run: Any, trust: Trust, revoked: str
    ) -> None:
        publish(run, trust, run.manifest(1), signer=run.second)
        left = run.second if revoked == "publisher" else run.publisher
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(left.peer_id,)))
        assert trust.catalogue is None
        assert (trust.head_in_force is None) == (revoked == "publisher")

    def test_a_revision_of_a_node_without_catalogue_leaves_it_without(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(1), run.now_ms)
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor))
        assert trust.catalogue is None

    def test_the_head_of_a_revoked_key_vouches_for_no_manifest_and_no_catalogue(self, run: Any, trust: Trust) -> None:
        manifest = run.sign(run.manifest(1), run.publisher)
        catalogue = run.sign(run.catalogue(run.manifest(1)), run.second)
        digests = {"manifest_digest": record_digest(manifest), "catalogue_digest": record_digest(catalogue)}
        trust.accept_head(run.signed_head(1, **digests), run.now_ms)
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,)))
        assert code_of(trust, lambda: trust.accept_manifest(manifest)) == "untrusted"
        assert code_of(trust, lambda: trust.accept_catalogue(catalogue)) == "mismatch"
        trust.accept_head(run.sign(run.head(1, **digests), run.second), run.now_ms)
        assert trust.accept_manifest(manifest) == run.manifest(1), "a head in force names it, before its catalogue came"

    def test_no_catalogue_counts_before_a_head_names_it(self, run: Any, trust: Trust) -> None:
        catalogue = run.sign(run.catalogue(run.manifest(1)), run.publisher)
        assert code_of(trust, lambda: trust.accept_catalogue(catalogue)) == "mismatch"
        trust.accept_head(run.signed_head(1), run.now_ms)
        assert code_of(trust, lambda: trust.accept_catalogue(catalogue)) == "mismatch"

    def test_a_catalogue_that_a_head_names_is_signed_by_an_authority(self, run: Any, trust: Trust) -> None:
        with pytest.raises(TrustError) as caught:
            publish(run, trust, run.manifest(1), signer=run.stranger)
        assert caught.value.code == "untrusted"

    def test_an_epoch_of_a_revision_that_is_not_known_waits_for_it(self, run: Any, trust: Trust) -> None:
        order = run.sign(run.epoch(1, 4, revision=1), run.owner)
        assert code_of(trust, lambda: trust.accept_epoch(order)) == "revision-unknown"


class TestTimes:
    def test_a_head_is_over_at_the_instant_it_names(self, run: Any, trust: Trust) -> None:
        head = run.head(1)
        signed = run.sign(head, run.publisher)
        assert code_of(trust, lambda: trust.accept_head(signed, head.valid_until_ms)) == "expired"
        assert trust.accept_head(signed, head.valid_until_ms - 1) == head

    def test_the_last_instant_of_a_clock_ahead_still_counts(self, run: Any, trust: Trust) -> None:
        ahead_ms = run.now_ms + 300_000
        late = run.signed_head(1, issued_at_ms=ahead_ms + 1)
        assert code_of(trust, lambda: trust.accept_head(late, run.now_ms)) == "future"
        trust.accept_head(run.signed_head(1, issued_at_ms=ahead_ms), run.now_ms)
        have = Have(run.run_id, "seed", 0, 1, 3, (), (), ahead_ms)
        assert trust.accept_have(run.sign(have, run.stranger), run.now_ms) == have

    def test_the_operators_minimum_holds_for_a_node_that_knows_less(self, run: Any, real_verify: Any) -> None:
        trust = run.trust()
        trust.accept_head(run.signed_head(57), run.now_ms)
        again = Trust.restore(trust.save(), run.run_id, real_verify, version_min=Version(0, 60))
        assert code_of(again, lambda: again.accept_head(run.signed_head(59), run.now_ms)) == "rollback"
        again.accept_head(run.signed_head(60), run.now_ms)


class TestEpochs:
    def test_a_head_of_a_later_epoch_names_the_record_of_that_epoch(self, run: Any, trust: Trust) -> None:
        order = run.sign(run.epoch(1, 4), run.owner)
        trust.accept_epoch(order)
        head = run.signed_head(5, epoch=2, epoch_digest=record_digest(order))
        assert code_of(trust, lambda: trust.accept_head(head, run.now_ms)) == "epoch"

    def test_an_epoch_begins_without_catalogue(self, run: Any, trust: Trust) -> None:
        publish(run, trust, run.manifest(1))
        trust.accept_epoch(run.sign(run.epoch(1, 2), run.owner))
        assert trust.catalogue is None

    def test_the_owners_order_is_a_higher_epoch_and_a_second_record_of_one_epoch_is_a_fork(
        self, run: Any, trust: Trust
    ) -> None:
        order = run.sign(run.epoch(1, 4), run.owner)
        trust.accept_epoch(order)
        trust.accept_head(run.signed_head(4, epoch=1, epoch_digest=record_digest(order)), run.now_ms)
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,)))
        second = run.sign(run.epoch(1, 4, revision=1), run.owner)
        fork_of(lambda: trust.accept_epoch(second))
        assert trust.head is not None, "the head of the revoked key is still the floor"

    def test_the_first_proof_of_a_fork_stays(self, run: Any, trust: Trust) -> None:
        trust.accept_epoch(run.sign(run.epoch(1, 4), run.owner))
        records = [run.sign(run.epoch(2, 9, kept_version=None, kept_root=None, reason=r), run.owner) for r in "abc"]
        trust.accept_epoch(records[0])
        trust.accept_head(run.signed_head(9, epoch=2, epoch_digest=record_digest(records[0])), run.now_ms)
        for other in records[1:]:
            fork_of(lambda other=other: trust.accept_epoch(other))  # type: ignore[misc]
        assert trust.fork is not None
        assert (trust.fork.first, trust.fork.second) == (records[0], records[1])

    def test_numbers_start_again_from_what_still_binds(self, run: Any, make_run: Callable[..., Any]) -> None:
        run = make_run(authorities=tuple(sorted((run.publisher.peer_id, run.second.peer_id, run.stranger.peer_id))))
        trust = run.trust()
        trust.accept_head(run.sign(run.head(60), run.second), run.now_ms)
        trust.accept_epoch(run.sign(run.epoch(1, 99), run.publisher, run.stranger))
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,)))
        trust.accept_epoch(run.sign(run.epoch(2, 61, revision=1), run.owner))
        assert trust.number_max == 60, "the head of a key that stays binds, the epoch of revoked ones does not"

    def test_a_run_that_nothing_binds_begins_at_one(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(70), run.now_ms)
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,)))
        order = run.epoch(1, 1, revision=1, kept_version=None, kept_root=None)
        trust.accept_epoch(run.sign(order, run.owner))
        assert trust.number_max == 0

    def test_the_descriptors_table_binds_epoch_zero_alone(self, make_run: Callable[..., Any]) -> None:
        run = make_run(table_digest=digest("other"), base_root=digest("root 0"), base_blob_id=digest("blob 0"))
        trust = run.trust()
        trust.accept_epoch(run.sign(run.epoch(1, 3), run.owner))
        manifest = run.manifest(3, epoch=1, is_anchor=True)
        assert trust.accept_manifest(run.sign(manifest, run.publisher)) == manifest


class TestCatalogues:
    def test_what_a_catalogue_says_is_evidence(self, run: Any, trust: Trust) -> None:
        publish(run, trust, run.manifest(1), run.manifest(2))
        fork_of(lambda: trust.accept_manifest(run.sign(run.manifest(1, root=digest("other")), run.publisher)))

    def test_one_that_fits_the_head_in_all_but_its_name_is_refused(self, run: Any, trust: Trust) -> None:
        publish(run, trust, run.manifest(1), run.manifest(2))
        other = run.sign(run.catalogue(run.manifest(2)), run.publisher)
        assert code_of(trust, lambda: trust.accept_catalogue(other)) == "mismatch"

    def test_one_of_a_later_epoch_than_its_heads_is_refused(self, run: Any, trust: Trust) -> None:
        catalogue = run.sign(run.catalogue(run.manifest(1), epoch=1), run.publisher)
        digests = {
            "manifest_digest": record_digest(run.sign(run.manifest(1), run.publisher)),
            "catalogue_digest": record_digest(catalogue),
        }
        trust.accept_head(run.signed_head(1, **digests), run.now_ms)
        assert code_of(trust, lambda: trust.accept_catalogue(catalogue)) == "mismatch"

    @pytest.mark.parametrize("number", [2, 9])
    def test_one_that_lists_what_was_cut_or_lies_ahead_is_refused(self, run: Any, trust: Trust, number: int) -> None:
        """Everything else about it is as it should be."""
        order = run.sign(run.epoch(1, 3, kept_version=Version(0, 1), kept_root=digest("root 1")), run.owner)
        trust.accept_epoch(order)
        newest = run.manifest(3, epoch=1, is_anchor=True)
        stray = run.manifest(number, epoch=0 if number == 2 else 1, is_anchor=True)
        entries = [entry_of(one, record_digest(run.sign(one, run.publisher))) for one in (stray, newest)]
        signed = run.sign(
            Catalogue(run.run_id, 1, tuple(sorted(entries, key=lambda entry: entry.version))), run.publisher
        )
        digests = {"manifest_digest": entries[1].manifest_digest, "catalogue_digest": record_digest(signed)}
        head = run.signed_head(3, epoch=1, epoch_digest=record_digest(order), **digests)
        trust.accept_head(head, run.now_ms)
        assert code_of(trust, lambda: trust.accept_catalogue(signed)) == "mismatch"
        publish(run, trust, newest, epoch=1, epoch_digest=record_digest(order), issued_at_ms=run.now_ms + 1)


class TestForkProofs:
    @pytest.mark.parametrize("kind", ["head", "catalogue", "manifest"])
    def test_no_claim_of_a_stranger_is_proof(self, run: Any, trust: Trust, kind: str) -> None:
        make: dict[str, Callable[[], Any]] = {
            "head": lambda: run.head(1, root=digest("other")),
            "catalogue": lambda: run.catalogue(run.manifest(1, root=digest("other"))),
            "manifest": lambda: run.manifest(1, root=digest("other")),
        }
        known = run.sign(run.manifest(1), run.publisher)
        forged = run.sign(make[kind](), run.stranger)
        assert code_of(trust, lambda: trust.accept_fork_proof(known, forged)) == "untrusted"
        trust.accept_fork_proof(known, run.sign(make[kind](), run.second))
