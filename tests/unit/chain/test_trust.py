"""What a node believes, what it refuses and what it never forgets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.floor import EPOCH_OF_AUTHORITIES_MAX
from pulsenet.chain.records import Catalogue, Have, Kind, RolloutBatch
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust, entry_of
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, Version, compute_digest
from pulsenet.wire.schema import INTEGER_MAX

HOUR_MS = 3_600_000


@contextmanager
def refused(trust: Trust, code: str):
    """The block raises ``code`` and what the node believes stays as it was."""
    before = trust.save()
    with pytest.raises(TrustError) as caught:
        yield
    assert caught.value.code == code
    assert trust.save() == before


@contextmanager
def forks(trust: Trust):
    with pytest.raises(TrustError) as caught:
        yield
    assert caught.value.code == "fork"
    assert trust.fork is not None


def digest(text: str) -> Digest:
    return compute_digest(text.encode())


@pytest.fixture
def trust(run: Any) -> Trust:
    return run.trust()


@pytest.fixture
def published(run: Any) -> tuple[Trust, list[Any]]:
    """A node at version 3 with catalogue, and the signed manifests 1 to 3."""
    manifests = [run.manifest(number) for number in (1, 2, 3)]
    signed = [run.sign(manifest, run.publisher) for manifest in manifests]
    catalogue = run.sign(run.catalogue(*manifests), run.publisher)
    head = run.signed_head(3, manifest_digest=record_digest(signed[2]), catalogue_digest=record_digest(catalogue))
    trust = run.trust()
    trust.accept_head(head, run.now_ms)
    trust.accept_catalogue(catalogue)
    return trust, signed


class TestHeads:
    def test_a_newer_head_is_believed(self, run: Any, trust: Trust) -> None:
        assert trust.stale(run.now_ms)
        trust.accept_head(run.signed_head(1), run.now_ms)
        head = trust.accept_head(run.signed_head(57), run.now_ms)
        assert trust.head == head
        assert head.version == Version(0, 57)
        assert trust.number_max == 57
        assert trust.head_in_force
        assert not trust.stale(run.now_ms)

    def test_nothing_is_believed_before_the_genesis(self, run: Any, real_verify: Any) -> None:
        trust = Trust(run.run_id, real_verify)
        with refused(trust, "revision-unknown"):
            trust.accept_head(run.signed_head(1), run.now_ms)
        assert not trust.epoch_is_endorsed

    def test_nothing_is_believed_below_the_tokens_revision(self, run: Any) -> None:
        trust = run.trust(revision_min=1)
        with refused(trust, "revision-unknown"):
            trust.accept_head(run.signed_head(1), run.now_ms)
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor))
        trust.accept_head(run.signed_head(1), run.now_ms)

    def test_a_key_not_on_the_list_is_ignored_a_auth_1(self, run: Any, trust: Trust) -> None:
        """A-AUTH-1."""
        for key in (run.stranger, run.owner, run.trainer, run.inferencer):
            with refused(trust, "untrusted"):
                trust.accept_head(run.sign(run.head(1), key), run.now_ms)

    def test_a_rollback_is_refused_also_after_a_restart_a_chain_6(
        self, run: Any, trust: Trust, real_verify: Any
    ) -> None:
        trust.accept_head(run.signed_head(57), run.now_ms)
        with refused(trust, "rollback"):
            trust.accept_head(run.signed_head(41), run.now_ms)
        again = Trust.restore(trust.save(), run.run_id, real_verify)
        assert again.head == trust.head
        with refused(again, "rollback"):
            again.accept_head(run.signed_head(41), run.now_ms)
        with refused(again, "rollback"):
            again.accept_head(run.signed_head(41), run.now_ms + HOUR_MS)

    def test_the_newest_head_costs_no_signature_check_again(self, run: Any, real_verify: Any) -> None:
        checked: list[bytes] = []

        def verify(*what: Any) -> bool:
            checked.append(what[1])
            return bool(real_verify(*what))

        trust = Trust(run.run_id, verify)
        trust.accept_descriptor(run.genesis)
        checked.clear()
        head = trust.accept_head(run.signed_head(57), run.now_ms)
        assert trust.accept_head(run.signed_head(57), run.now_ms + 10**9) == head, "late, but no news"
        assert len(checked) == 1
        trust.accept_head(run.signed_head(58), run.now_ms)
        assert len(checked) == 2

    def test_an_old_head_under_a_fresh_directory_expiry_is_refused_a_auth_4(self, run: Any, trust: Trust) -> None:
        """A-AUTH-4."""
        old = run.signed_head(41, issued_at_ms=run.now_ms - HOUR_MS)
        with refused(trust, "expired"):
            trust.accept_head(old, run.now_ms)
        trust.accept_head(run.signed_head(57), run.now_ms)
        with refused(trust, "rollback"):
            trust.accept_head(old, run.now_ms)

    def test_a_frozen_head_becomes_stale_a_auth_5(self, run: Any, trust: Trust) -> None:
        """A-AUTH-5."""
        signed = run.signed_head(57)
        trust.accept_head(signed, run.now_ms)
        assert not trust.stale(run.now_ms + 299_999)
        trust.accept_head(signed, run.now_ms + 300_000)  # the same head again is no news and no fault
        assert trust.stale(run.now_ms + 300_000)
        trust.accept_head(run.signed_head(57, issued_at_ms=run.now_ms + 299_000), run.now_ms + 300_000)
        assert not trust.stale(run.now_ms + 300_000)

    def test_an_earlier_issue_of_the_same_version_changes_nothing(self, run: Any, trust: Trust) -> None:
        newest = trust.accept_head(run.signed_head(57), run.now_ms)
        before = trust.save()
        assert trust.accept_head(run.signed_head(57, issued_at_ms=run.now_ms - 40_000), run.now_ms) is newest
        assert trust.save() == before

    def test_a_head_from_a_clock_far_ahead_is_refused_a_dht_3(self, run: Any, trust: Trust) -> None:
        with refused(trust, "future"):
            trust.accept_head(run.signed_head(5, issued_at_ms=run.now_ms + 24 * HOUR_MS), run.now_ms)
        trust.accept_head(run.signed_head(5, issued_at_ms=run.now_ms + 60_000), run.now_ms)
        trust.accept_head(run.signed_head(6, issued_at_ms=run.now_ms), run.now_ms)
        assert trust.head is not None
        assert trust.head.version.number == 6

    def test_a_head_of_a_later_revision_waits_for_it(self, run: Any, trust: Trust) -> None:
        with refused(trust, "revision-unknown"):
            trust.accept_head(run.signed_head(1, revision=1), run.now_ms)
        assert trust.next_revision == 1

    def test_a_node_without_state_holds_to_the_operators_minimum_a_auth_7(self, run: Any) -> None:
        """A-AUTH-7."""
        trust = run.trust(version_min=Version(0, 50))
        with refused(trust, "rollback"):
            trust.accept_head(run.signed_head(41), run.now_ms)
        trust.accept_head(run.signed_head(50), run.now_ms)
        trust.accept_head(run.signed_head(51), run.now_ms)
        with refused(trust, "rollback"):
            trust.accept_head(run.signed_head(50), run.now_ms)

    def test_a_head_of_another_run_with_the_same_keys_is_refused_a_auth_6(
        self, run: Any, trust: Trust, make_run: Callable[..., Any]
    ) -> None:
        """A-AUTH-6."""
        other = make_run(nonce=b"another run 1234")
        with refused(trust, "wrong-run"):
            trust.accept_head(other.signed_head(1), run.now_ms)
        with refused(trust, "wrong-type"):
            trust.accept_head(run.sign(run.manifest(1), run.publisher), run.now_ms)

    def test_a_deposed_coordinator_is_refused(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.sign(run.head(5, term=2), run.publisher), run.now_ms)
        with refused(trust, "term"):
            trust.accept_head(run.sign(run.head(6, term=1), run.second), run.now_ms)
        with refused(trust, "term"):
            trust.accept_head(run.sign(run.head(6, term=2), run.second), run.now_ms)
        trust.accept_head(run.sign(run.head(6, term=3), run.second), run.now_ms)

    def test_one_version_in_two_terms_is_no_fork_while_its_root_is_one(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.sign(run.head(5, term=2), run.publisher), run.now_ms)
        other = run.head(5, term=3, issued_at_ms=run.now_ms + 1, manifest_digest=compute_digest(b"of the second"))
        assert trust.accept_head(run.sign(other, run.second), run.now_ms) == other
        assert (trust.fork, trust.head) == (None, other)
        assert trust.root_of(Version(0, 5)) == other.root
        assert trust.root_of(Version(0, 6)) is None
        third = run.head(5, term=4, root=compute_digest(b"other bits"), issued_at_ms=run.now_ms + 2)
        with pytest.raises(TrustError, match="fork"):
            trust.accept_head(run.sign(third, run.publisher), run.now_ms)
        assert trust.fork is not None


class TestRevocation:
    def test_the_head_of_a_revoked_key_stays_the_floor_and_is_no_longer_in_force(
        self, run: Any, published: tuple[Trust, list[Any]], real_verify: Any
    ) -> None:
        trust, _ = published
        revision = run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,))
        trust.accept_descriptor(revision)
        assert trust.head is not None
        assert trust.catalogue is None
        assert not trust.head_in_force
        assert trust.stale(run.now_ms)
        assert not trust.may_publish(run.publisher.peer_id)
        with refused(trust, "untrusted"):
            trust.accept_head(run.signed_head(4), run.now_ms)
        with refused(trust, "rollback"):
            trust.accept_head(run.sign(run.head(2), run.second), run.now_ms)
        again = Trust.restore(trust.save(), run.run_id, real_verify)
        assert not again.head_in_force
        again.accept_head(run.sign(run.head(3, issued_at_ms=run.now_ms - 1), run.second), run.now_ms)
        assert again.head_in_force

    def test_an_epoch_record_of_revoked_signers_asks_for_new_signatures(self, run: Any, trust: Trust) -> None:
        assert trust.epoch_is_endorsed
        record = run.epoch(1, 4)
        trust.accept_epoch(run.sign(record, run.publisher, run.second))
        assert trust.epoch_is_endorsed
        authorities = tuple(sorted((run.second.peer_id, run.stranger.peer_id)))
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=authorities))
        assert not trust.epoch_is_endorsed
        trust.accept_epoch(run.sign(record, run.second, run.stranger))
        assert trust.epoch_is_endorsed
        assert trust.epoch_record == record

    def test_a_former_authoritys_manifest_counts_only_while_the_catalogue_names_it(
        self, run: Any, published: tuple[Trust, list[Any]]
    ) -> None:
        trust, signed = published
        revision = run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,))
        trust.accept_descriptor(revision)
        with refused(trust, "untrusted"):
            trust.accept_manifest(signed[1])
        manifests = [run.manifest(number) for number in (1, 2, 3)]
        catalogue = run.sign(run.catalogue(*manifests), run.second)
        digests = {"manifest_digest": record_digest(signed[2]), "catalogue_digest": record_digest(catalogue)}
        trust.accept_head(run.sign(run.head(3, **digests), run.second), run.now_ms)
        trust.accept_catalogue(catalogue)
        assert trust.accept_manifest(signed[1]) == manifests[1]
        assert trust.accept_manifest(signed[2]) == manifests[2]


class TestEpochs:
    def test_a_higher_epoch_needs_its_record_first(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(58), run.now_ms)
        record = run.sign(run.epoch(1, 59, kept_version=Version(0, 55)), run.owner)
        head = run.signed_head(59, epoch=1, epoch_digest=record_digest(record))
        with refused(trust, "epoch"):
            trust.accept_head(head, run.now_ms)
        trust.accept_epoch(record)
        assert trust.head is not None
        assert trust.stale(run.now_ms)
        trust.accept_head(head, run.now_ms)
        assert (trust.epoch, trust.epoch_digest) == (1, record_digest(record))
        with refused(trust, "rollback"):
            trust.accept_head(run.signed_head(60), run.now_ms)

    def test_owners_or_most_authorities_open_an_epoch(self, run: Any, trust: Trust) -> None:
        for signers in [(run.publisher,), (run.second,)]:
            with refused(trust, "untrusted"):
                trust.accept_epoch(run.sign(run.epoch(1, 4), *signers))
        for signers in [(run.stranger,), (run.owner, run.stranger)]:
            with refused(trust, "untrusted"):
                trust.accept_epoch(run.sign(run.epoch(1, 4), *signers))
        trust.accept_epoch(run.sign(run.epoch(1, 4), run.publisher, run.second))
        trust.accept_epoch(run.sign(run.epoch(2, 9, kept_version=Version(1, 8)), run.owner))
        assert len(trust.epoch_records) == 2

    def test_too_few_owners_open_no_epoch(self, make_run: Callable[..., Any], real_verify: Any) -> None:
        probe = make_run()
        owners = tuple(sorted((probe.owner.peer_id, probe.trainer.peer_id)))
        run = make_run(owners=owners, owner_threshold=2)
        with pytest.raises(TrustError, match="untrusted"):
            run.trust()
        genesis = run.sign(run.descriptor, run.owner, run.trainer)
        trust = Trust(run.run_id, real_verify)
        trust.accept_descriptor(genesis)
        with refused(trust, "untrusted"):
            trust.accept_epoch(run.sign(run.epoch(1, 4), run.owner))
        trust.accept_epoch(run.sign(run.epoch(1, 4), run.owner, run.trainer))

    def test_numbers_never_fall_across_epochs(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(58), run.now_ms)
        with refused(trust, "rollback"):
            trust.accept_epoch(run.sign(run.epoch(1, 58), run.owner))
        trust.accept_epoch(run.sign(run.epoch(3, 70, kept_version=Version(0, 57)), run.owner))
        assert trust.number_max == 69
        with refused(trust, "rollback"):
            trust.accept_epoch(run.sign(run.epoch(2, 80), run.owner))

    def test_heads_before_the_epochs_first_number_are_refused(self, run: Any, trust: Trust) -> None:
        record = run.sign(run.epoch(1, 59), run.owner)
        trust.accept_epoch(record)
        with refused(trust, "epoch"):
            trust.accept_head(run.signed_head(58, epoch=1, epoch_digest=record_digest(record)), run.now_ms)

    def test_a_publisher_that_died_before_its_first_head_may_open_the_epoch_again(self, run: Any, trust: Trust) -> None:
        trust.accept_epoch(run.sign(run.epoch(1, 59, reason="first try"), run.owner))
        record = run.sign(run.epoch(1, 59, reason="second try"), run.owner)
        trust.accept_epoch(record)
        trust.accept_head(run.signed_head(59, epoch=1, epoch_digest=record_digest(record)), run.now_ms)
        other = run.sign(run.epoch(1, 59, reason="a second publisher"), run.owner)
        with refused(trust, "epoch"):
            trust.accept_head(run.signed_head(60, epoch=1, epoch_digest=record_digest(other)), run.now_ms)
        with forks(trust):
            trust.accept_epoch(other)

    def test_the_record_in_force_may_be_signed_anew_after_its_first_head(self, run: Any, trust: Trust) -> None:
        record = run.epoch(1, 59)
        signed = run.sign(record, run.owner)
        trust.accept_epoch(signed)
        trust.accept_head(run.signed_head(59, epoch=1, epoch_digest=record_digest(signed)), run.now_ms)
        anew = run.sign(record, run.publisher, run.second)
        assert trust.accept_epoch(anew) == record
        assert trust.epoch_records == (anew,)
        assert trust.head_in_force

    def test_the_history_after_the_kept_version_is_cut(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(58), run.now_ms)
        trust.accept_epoch(
            run.sign(run.epoch(1, 59, kept_version=Version(0, 55), kept_root=digest("root 55")), run.owner)
        )
        assert trust.is_kept(Version(0, 55))
        assert not trust.is_kept(Version(0, 56))
        assert trust.is_kept(Version(1, 59))
        assert trust.is_kept(Version(2, 99)) is False
        with refused(trust, "rollback"):
            trust.accept_manifest(run.sign(run.manifest(56), run.publisher))
        trust.accept_manifest(run.sign(run.manifest(55), run.publisher))
        trust.accept_epoch(run.sign(run.epoch(2, 80, kept_version=None, kept_root=None), run.owner))
        assert not trust.is_kept(Version(0, 55))

    def test_an_epoch_starts_on_the_version_it_keeps_or_with_an_anchor(self, run: Any, trust: Trust) -> None:
        trust.accept_epoch(run.sign(run.epoch(1, 59), run.owner))
        first = {"epoch": 1, "base_version": Version(0, 58)}
        assert trust.accept_manifest(run.sign(run.manifest(59, **first), run.publisher)).version == Version(1, 59)
        with refused(trust, "mismatch"):
            trust.accept_manifest(run.sign(run.manifest(59, **first, base_root=digest("other")), run.publisher))
        with refused(trust, "mismatch"):
            trust.accept_manifest(run.sign(run.manifest(60, **first), run.publisher))
        with refused(trust, "epoch"):
            trust.accept_manifest(run.sign(run.manifest(58, epoch=1, is_anchor=True), run.publisher))
        with refused(trust, "epoch"):
            trust.accept_manifest(run.sign(run.manifest(59, epoch=1), run.publisher))
        with refused(trust, "epoch"):
            trust.accept_manifest(run.sign(run.manifest(9, epoch=2, is_anchor=True), run.publisher))


class TestOwnersOrders:
    """The way back from a leaked key, which as in TUF only those have who may change the keys."""

    @staticmethod
    def revoke(run: Any, trust: Trust) -> Any:
        """Drop the publisher's key; the second authority goes on. Returns the revision."""
        revision = run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,))
        trust.accept_descriptor(revision)
        return revision

    @staticmethod
    def order(run: Any, epoch: int = 1, first_number: int = 58, **changes: Any) -> Any:
        return run.sign(run.epoch(epoch, first_number, **{"revision": 1, **changes}), run.owner)

    def test_the_owners_lift_the_floor_of_a_key_they_revoked_fast_forward(
        self, run: Any, trust: Trust, real_verify: Any
    ) -> None:
        trust.accept_head(run.signed_head(57), run.now_ms)
        trust.accept_head(run.signed_head(INTEGER_MAX), run.now_ms)
        self.revoke(run, trust)
        order = self.order(run)
        trust.accept_epoch(order)
        assert (trust.head, trust.number_max) == (None, 57)
        head = run.head(58, epoch=1, epoch_digest=record_digest(order), revision=1)
        again = Trust.restore(trust.save(), run.run_id, real_verify)
        for node in (trust, again):
            assert node.accept_head(run.sign(head, run.second), run.now_ms) == head
            with refused(node, "untrusted"):
                node.accept_head(run.signed_head(INTEGER_MAX), run.now_ms)

    def test_without_revocation_numbers_never_fall_whoever_signs(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(70), run.now_ms)
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor))
        with refused(trust, "rollback"):
            trust.accept_epoch(self.order(run))

    def test_authorities_cannot_lift_the_floor_of_a_revoked_key(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(70), run.now_ms)
        self.revoke(run, trust)
        with refused(trust, "rollback"):
            trust.accept_epoch(run.sign(run.epoch(1, 58, revision=1), run.second))

    def test_an_order_from_before_the_revocation_lifts_nothing(self, run: Any, trust: Trust) -> None:
        """Else whoever kept an old order of the owners could take the run back with it."""
        trust.accept_head(run.signed_head(70), run.now_ms)
        self.revoke(run, trust)
        with refused(trust, "rollback"):
            trust.accept_epoch(self.order(run, revision=0))

    def test_the_word_of_keys_that_stay_still_binds(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.sign(run.head(60), run.second), run.now_ms)
        self.revoke(run, trust)
        with refused(trust, "rollback"):
            trust.accept_epoch(self.order(run))
        trust.accept_epoch(self.order(run, first_number=61))
        assert trust.head is not None
        assert trust.number_max == 60

    def test_what_revoked_keys_cut_is_whole_again(self, run: Any, make_run: Callable[..., Any]) -> None:
        run = make_run(authorities=(run.publisher.peer_id,))
        trust = run.trust()
        trust.accept_epoch(run.sign(run.epoch(9, 90, kept_version=Version(0, 3)), run.publisher))
        assert not trust.is_kept(Version(0, 57))
        self.revoke(run, trust)
        with refused(trust, "rollback"):
            trust.accept_epoch(self.order(run, epoch=8))
        trust.accept_epoch(self.order(run, epoch=10, kept_version=Version(0, 57)))
        assert trust.is_kept(Version(0, 57))
        assert not trust.is_kept(Version(0, 58))
        assert len(trust.epoch_records) == 1

    def test_the_owners_always_have_a_higher_epoch(self, run: Any, trust: Trust) -> None:
        last = EPOCH_OF_AUTHORITIES_MAX
        with refused(trust, "untrusted"):
            trust.accept_epoch(run.sign(run.epoch(last + 1, 4), run.publisher, run.second))
        trust.accept_epoch(run.sign(run.epoch(last, 4), run.publisher, run.second))
        trust.accept_epoch(run.sign(run.epoch(last + 1, 4), run.owner))
        assert trust.epoch == last + 1


class TestLastHeads:
    """What a newcomer may believe while the publisher is away."""

    def test_a_head_whose_time_is_over_is_believed_as_stale(self, run: Any, trust: Trust) -> None:
        later = run.now_ms + HOUR_MS
        with refused(trust, "expired"):
            trust.accept_head(run.signed_head(57), later)
        head = trust.accept_last_head(run.signed_head(57), later)
        assert trust.head == head
        assert trust.head_in_force
        assert trust.stale(later)

    def test_it_never_takes_the_place_of_one_that_is_valid(self, run: Any, trust: Trust) -> None:
        later = run.now_ms + HOUR_MS
        trust.accept_head(run.signed_head(57, issued_at_ms=later), later)
        with refused(trust, "expired"):
            trust.accept_last_head(run.signed_head(58), later)

    def test_every_other_rule_holds_for_it(self, run: Any, trust: Trust) -> None:
        """A-AUTH-7: nothing but the time is forgiven."""
        later = run.now_ms + HOUR_MS
        trust.accept_last_head(run.signed_head(57), later)
        with refused(trust, "rollback"):
            trust.accept_last_head(run.signed_head(41), later)
        with refused(trust, "untrusted"):
            trust.accept_last_head(run.sign(run.head(58), run.stranger), later)
        with forks(trust):
            trust.accept_last_head(run.signed_head(57, root=digest("other"), issued_at_ms=run.now_ms + 1), later)

    def test_the_publisher_that_comes_back_is_believed(self, run: Any, trust: Trust) -> None:
        later = run.now_ms + HOUR_MS
        trust.accept_last_head(run.signed_head(57), later)
        trust.accept_head(run.signed_head(57, issued_at_ms=later), later)
        assert not trust.stale(later)


class TestForks:
    def test_a_publisher_that_reuses_numbers_forks_the_epoch_a_chain_4(
        self, run: Any, trust: Trust, real_verify: Any
    ) -> None:
        trust.accept_head(run.signed_head(56), run.now_ms)
        trust.accept_head(run.signed_head(58), run.now_ms)
        other = run.signed_head(56, root=digest("other 56"))
        with forks(trust):
            trust.accept_head(other, run.now_ms)
        assert trust.fork is not None
        assert trust.fork.version == Version(0, 56)
        assert trust.head is not None
        assert trust.head.version.number == 58
        restored = Trust.restore(trust.save(), run.run_id, real_verify)
        for node in (trust, restored):
            with refused(node, "fork"):
                node.accept_head(run.signed_head(59), run.now_ms)
            with refused(node, "fork"):
                node.accept_manifest(run.sign(run.manifest(59), run.publisher))
        record = run.sign(run.epoch(1, 59), run.owner)
        restored.accept_epoch(record)
        assert restored.fork is None
        restored.accept_head(run.signed_head(59, epoch=1, epoch_digest=record_digest(record)), run.now_ms)

    def test_one_key_on_two_machines_forks_the_epoch_once_for_good_a_auth_3(self, run: Any, trust: Trust) -> None:
        """A-AUTH-3."""
        trust.accept_head(run.signed_head(58), run.now_ms)
        later = run.now_ms + 1000
        with forks(trust):
            trust.accept_head(run.signed_head(58, root=digest("twin"), issued_at_ms=later), later)
        proof = trust.fork
        with refused(trust, "fork"):
            trust.accept_head(run.signed_head(58, root=digest("twin"), issued_at_ms=later), later)
        assert trust.fork is proof

    def test_a_later_manifest_on_another_root_betrays_the_fork(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(58), run.now_ms)
        trust.accept_head(run.signed_head(59, root=digest("other 59")), run.now_ms)
        betrayed = run.manifest(59, base_root=digest("other 58"), root=digest("other 59"))
        with forks(trust):
            trust.accept_manifest(run.sign(betrayed, run.publisher))
        assert trust.fork is not None
        assert trust.fork.version == Version(0, 58)

    def test_a_catalogue_with_another_root_betrays_the_fork(self, run: Any, trust: Trust) -> None:
        trust.accept_head(run.signed_head(2, root=digest("mine 2")), run.now_ms)
        manifests = [run.manifest(number) for number in (1, 2, 3)]
        catalogue = run.sign(run.catalogue(*manifests), run.publisher)
        digests = {
            "manifest_digest": record_digest(run.sign(manifests[2], run.publisher)),
            "catalogue_digest": record_digest(catalogue),
        }
        trust.accept_head(run.signed_head(3, **digests), run.now_ms)
        with forks(trust):
            trust.accept_catalogue(catalogue)

    def test_a_proof_convinces_a_node_that_saw_one_side_or_none(self, run: Any, trust: Trust) -> None:
        first = run.sign(run.manifest(58), run.publisher)
        second = run.sign(run.manifest(58, root=digest("other")), run.publisher)
        proof = trust.accept_fork_proof(first, second)
        assert proof.version == Version(0, 58)
        assert trust.fork == proof
        assert trust.accept_fork_proof(second, first) == proof
        fresh = run.trust()
        fresh.accept_fork_proof(run.signed_head(58), second)
        assert fresh.fork is not None

    def test_every_kind_of_claim_can_be_proof(self, run: Any) -> None:
        manifest = run.manifest(1)
        catalogue = run.sign(run.catalogue(manifest), run.publisher)
        run.trust().accept_fork_proof(catalogue, run.signed_head(1, root=digest("other")))
        first, second = (run.sign(run.epoch(1, 9, reason=reason), run.owner) for reason in ("a", "b"))
        trust = run.trust()
        with refused(trust, "epoch"):
            trust.accept_fork_proof(first, second)
        trust.accept_epoch(first)
        trust.accept_fork_proof(first, second)
        assert trust.fork is not None

    def test_what_proves_nothing_is_refused(self, run: Any, trust: Trust) -> None:
        manifest = run.sign(run.manifest(58), run.publisher)
        with refused(trust, "mismatch"):
            trust.accept_fork_proof(manifest, manifest)
        with refused(trust, "mismatch"):
            trust.accept_fork_proof(manifest, run.signed_head(58))
        forged = run.sign(run.manifest(58, root=digest("other")), run.stranger)
        with refused(trust, "untrusted"):
            trust.accept_fork_proof(manifest, forged)
        with refused(trust, "wrong-type"):
            trust.accept_fork_proof(manifest, run.genesis)
        trust.accept_epoch(run.sign(run.epoch(1, 59), run.owner))
        other = run.sign(run.manifest(58, root=digest("other")), run.publisher)
        with refused(trust, "rollback"):
            trust.accept_fork_proof(manifest, other)


class TestCatalogues:
    def test_the_catalogue_the_head_names_is_believed(self, published: tuple[Trust, list[Any]]) -> None:
        trust, signed = published
        assert trust.catalogue is not None
        assert trust.catalogue_is_current
        assert [entry.manifest_digest for entry in trust.catalogue.entries] == [record_digest(one) for one in signed]

    def test_it_lags_until_the_new_one_comes(self, run: Any, published: tuple[Trust, list[Any]]) -> None:
        trust, _ = published
        trust.accept_head(run.signed_head(4), run.now_ms)
        assert trust.catalogue is not None
        assert not trust.catalogue_is_current

    def test_any_other_is_refused(self, run: Any, published: tuple[Trust, list[Any]]) -> None:
        trust, _ = published
        assert trust.catalogue_record is not None
        with refused(trust, "mismatch"):
            trust.accept_catalogue(run.sign(run.catalogue(run.manifest(1)), run.publisher))
        with refused(run.trust(), "mismatch"):
            run.trust().accept_catalogue(trust.catalogue_record)

    @pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3, 4), ()])
    def test_one_that_contradicts_its_head_is_refused(self, run: Any, trust: Trust, numbers: tuple[int, ...]) -> None:
        manifests = [run.manifest(number) for number in numbers]
        self._check_refused(run, trust, run.catalogue(*manifests))

    def test_one_of_another_epoch_or_with_cut_versions_is_refused(self, run: Any, trust: Trust) -> None:
        record = run.sign(run.epoch(1, 3, kept_version=Version(0, 1)), run.owner)
        trust.accept_epoch(record)
        manifests = [run.manifest(1), run.manifest(2), run.manifest(3, epoch=1, is_anchor=True)]
        self._check_refused(run, trust, run.catalogue(*manifests, epoch=1), epoch=1, epoch_digest=record_digest(record))
        head_only = run.catalogue(run.manifest(1), epoch=0)
        self._check_refused(
            run, trust, head_only, epoch=1, epoch_digest=record_digest(record), issued_at_ms=run.now_ms + 1
        )

    def _check_refused(self, run: Any, trust: Trust, catalogue: Catalogue, epoch: int = 0, **changes: Any) -> None:
        signed = run.sign(catalogue, run.publisher)
        manifest = run.sign(run.manifest(3), run.publisher)
        digests = {"manifest_digest": record_digest(manifest), "catalogue_digest": record_digest(signed)}
        trust.accept_head(run.signed_head(3, epoch=epoch, **digests, **changes), run.now_ms)
        with refused(trust, "mismatch"):
            trust.accept_catalogue(signed)


class TestManifests:
    def test_an_authoritys_manifest_is_believed_before_its_head(self, run: Any, trust: Trust) -> None:
        manifest = run.manifest(1)
        assert trust.accept_manifest(run.sign(manifest, run.publisher)) == manifest
        assert trust.number_max == 1

    def test_a_manifest_is_bound_to_signer_run_and_revision(
        self, run: Any, trust: Trust, make_run: Callable[..., Any]
    ) -> None:
        with refused(trust, "untrusted"):
            trust.accept_manifest(run.sign(run.manifest(1), run.stranger))
        with refused(trust, "wrong-run"):
            trust.accept_manifest(run.sign(make_run(name="other").manifest(1), run.publisher))
        with refused(trust, "revision-unknown"):
            trust.accept_manifest(run.sign(run.manifest(1, revision=1), run.publisher))

    def test_every_flipped_byte_is_rejected_a_auth_2(self, run: Any, trust: Trust) -> None:
        """A-AUTH-2."""
        good = encode_signed(run.sign(run.manifest(1), run.publisher))
        before = trust.save()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 + position % 255
            with pytest.raises((RemoteProtocolError, TrustError)):
                trust.accept_manifest(decode_signed(bad))
        assert trust.save() == before
        trust.accept_manifest(decode_signed(good))

    def test_the_parameter_table_holds_through_an_epoch(self, run: Any, trust: Trust, real_verify: Any) -> None:
        trust.accept_manifest(run.sign(run.manifest(1), run.publisher))
        other = {"table_digest": digest("grown table")}
        with refused(trust, "table"):
            trust.accept_manifest(run.sign(run.manifest(2, **other), run.publisher))
        again = Trust.restore(trust.save(), run.run_id, real_verify)
        with refused(again, "table"):
            again.accept_manifest(run.sign(run.manifest(2, **other), run.publisher))
        again.accept_epoch(run.sign(run.epoch(1, 3), run.owner))
        again.accept_manifest(run.sign(run.manifest(3, epoch=1, is_anchor=True, **other), run.publisher))

    def test_a_descriptor_may_fix_table_and_base(self, make_run: Callable[..., Any]) -> None:
        fixed = {"table_digest": digest("table"), "base_root": digest("root 0"), "base_blob_id": digest("blob 0")}
        run = make_run(**fixed)
        trust = run.trust()
        on_base = run.manifest(1, is_anchor=False)
        trust.accept_manifest(run.sign(on_base, run.publisher))
        fresh = run.trust()
        with refused(fresh, "table"):
            fresh.accept_manifest(run.sign(replace(on_base, table_digest=digest("other")), run.publisher))
        with refused(fresh, "mismatch"):
            fresh.accept_manifest(run.sign(replace(on_base, base_root=digest("other")), run.publisher))

    def test_without_a_base_model_the_first_version_is_an_anchor_a_chain_3(self, run: Any, trust: Trust) -> None:
        with refused(trust, "mismatch"):
            trust.accept_manifest(run.sign(run.manifest(1, is_anchor=False), run.publisher))

    def test_a_manifest_must_say_what_the_head_and_the_catalogue_say(self, run: Any, trust: Trust) -> None:
        manifest = run.manifest(3)
        signed = run.sign(manifest, run.publisher)
        wrong = replace(entry_of(manifest, record_digest(signed)), encoded_size_bytes=31)
        catalogue = run.sign(Catalogue(run.run_id, 0, (wrong,)), run.publisher)
        digests = {"manifest_digest": record_digest(signed), "catalogue_digest": record_digest(catalogue)}
        trust.accept_head(run.signed_head(3, **digests), run.now_ms)
        trust.accept_catalogue(catalogue)
        with refused(trust, "mismatch"):
            trust.accept_manifest(signed)
        other = run.trust()
        other.accept_head(run.signed_head(4, **digests), run.now_ms)
        with refused(other, "mismatch"):
            other.accept_manifest(signed)


class TestOtherRecords:
    def have(self, run: Any, **changes: Any) -> Have:
        fields: dict[str, Any] = {
            "run_id": run.run_id,
            "role": "seed",
            "epoch": 0,
            "version_first": 1,
            "version_last": 3,
            "anchors": (1,),
            "addresses": ("/ip4/127.0.0.1/tcp/1",),
            "issued_at_ms": run.now_ms,
        }
        return Have(**{**fields, **changes})

    def test_anyone_may_say_what_it_has(self, run: Any, trust: Trust) -> None:
        signed = run.sign(self.have(run), run.stranger)
        assert trust.accept_have(signed) == trust.accept_have(signed, run.now_ms) == self.have(run)
        with refused(trust, "expired"):
            trust.accept_have(signed, run.now_ms + 300_000)
        with refused(trust, "future"):
            trust.accept_have(signed, run.now_ms - 300_001)

    def test_a_private_run_hears_members_only(self, make_run: Callable[..., Any]) -> None:
        run = make_run(private=True)
        trust = run.trust()
        with refused(trust, "untrusted"):
            trust.accept_have(run.sign(self.have(run), run.stranger))
        trust.accept_have(run.sign(self.have(run), run.inferencer))
        assert trust.is_member(run.owner.peer_id)
        assert not trust.is_member(run.stranger.peer_id)

    @pytest.mark.parametrize("cap", ["open_inferencers_max", "open_trainers_max"])
    def test_a_private_run_that_takes_strangers_hears_them(self, make_run: Callable[..., Any], cap: str) -> None:
        """The run ``local`` is private and lists no inferencer, and its inferencers share chunks."""
        run = make_run(private=True, **{cap: 1})
        assert run.trust().accept_have(run.sign(self.have(run), run.stranger)) == self.have(run)

    def batch(self, run: Any, **changes: Any) -> RolloutBatch:
        fields: dict[str, Any] = {
            "run_id": run.run_id,
            "sequence": 1,
            "version_first": Version(0, 2),
            "version_last": Version(0, 3),
            "sample_count": 1,
            "part_names": (),
            "logprob_bits": 32,
            "trainer": None,
            "task_ids": (),
            "body": b"",
            "metadata": "{}",
        }
        return RolloutBatch(**{**fields, **changes})

    def test_rollouts_count_from_listed_keys_only(self, run: Any, trust: Trust) -> None:
        assert trust.accept_rollouts(run.sign(self.batch(run), run.inferencer)) == self.batch(run)
        with refused(trust, "untrusted"):
            trust.accept_rollouts(run.sign(self.batch(run), run.stranger))
        with refused(trust, "epoch"):
            trust.accept_rollouts(run.sign(self.batch(run, version_last=Version(1, 9)), run.inferencer))

    def test_an_open_run_admits_strangers_up_to_its_cap(self, make_run: Callable[..., Any], real_verify: Any) -> None:
        run = make_run(open_inferencers_max=1)
        trust = run.trust()
        stranger = run.stranger.peer_id
        assert trust.counts_rollouts(stranger)
        assert trust.counts_rollouts(stranger, {stranger})
        assert not trust.counts_rollouts(stranger, {run.owner.peer_id})
        assert Trust(run.run_id, real_verify).counts_rollouts(stranger) is False
        assert not Trust(run.run_id, real_verify).may_publish(stranger)
        assert not Trust(run.run_id, real_verify).is_member(stranger)

    def test_kinds_are_told_apart(self, run: Any) -> None:
        skip = run.manifest(9, kind=Kind.SKIP, base_version=Version(0, 1), base_root=digest("root 1"))
        assert entry_of(skip, digest("x")).kind is Kind.SKIP
