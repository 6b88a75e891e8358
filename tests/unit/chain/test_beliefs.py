"""The state that outlives a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.beliefs import Beliefs, _State
from pulsenet.chain.signing import record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import StorageError, TrustError
from pulsenet.ids import Version, compute_digest
from pulsenet.wire.schema import decode_value, encode_value


@pytest.fixture
def full(run: Any) -> Trust:
    """A node in epoch 1 with head, catalogue, several manifests and a fork."""
    trust: Trust = run.trust(revision_min=0)
    record = run.sign(run.epoch(1, 5), run.owner)
    trust.accept_epoch(record)
    manifests = [run.manifest(4), run.manifest(5, epoch=1, is_anchor=True), run.manifest(6, epoch=1)]
    signed = [run.sign(manifest, run.publisher) for manifest in manifests]
    catalogue = run.sign(run.catalogue(*manifests, epoch=1), run.publisher)
    digests = {"manifest_digest": record_digest(signed[2]), "catalogue_digest": record_digest(catalogue)}
    trust.accept_head(run.signed_head(6, epoch=1, epoch_digest=record_digest(record), **digests), run.now_ms)
    trust.accept_catalogue(catalogue)
    for one in signed:
        trust.accept_manifest(one)
    other = run.manifest(6, epoch=1, root=compute_digest(b"other"))
    trust.accept_fork_proof(signed[2], run.sign(other, run.publisher))
    return trust


def test_what_is_saved_comes_back_whole(run: Any, full: Trust, real_verify: Any) -> None:
    restored = Trust.restore(full.save(), run.run_id, real_verify)
    assert isinstance(restored, Trust)
    assert restored.save() == full.save()
    assert restored.descriptor == full.descriptor
    assert restored.head == full.head
    assert restored.epoch_record == full.epoch_record
    assert restored.fork == full.fork
    assert restored.number_max == full.number_max == 6
    assert restored.catalogue_is_current


def test_an_empty_state_comes_back_empty(run: Any, real_verify: Any) -> None:
    empty = Beliefs(run.run_id, real_verify)
    restored = Beliefs.restore(empty.save(), run.run_id, real_verify)
    assert restored.head is None
    assert restored.head_record is None
    assert restored.catalogue is None
    assert restored.catalogue_record is None
    assert restored.catalogue_is_current is False
    assert restored.descriptor_record is None
    assert restored.epoch_record is None
    assert restored.epoch == 0
    assert restored.next_revision == 0


def test_a_fork_between_two_epoch_records_comes_back(run: Any, real_verify: Any) -> None:
    trust = run.trust()
    first, second = (run.sign(run.epoch(1, 9, reason=reason), run.owner) for reason in ("a", "b"))
    trust.accept_epoch(first)
    proof = trust.accept_fork_proof(first, second)
    assert Trust.restore(trust.save(), run.run_id, real_verify).fork == proof


def test_the_token_may_raise_the_minimum_revision_but_never_lower_it(run: Any, real_verify: Any) -> None:
    saved = run.trust(revision_min=2).save()
    for revision_min, due in [(0, 2), (3, 3)]:
        restored = Trust.restore(saved, run.run_id, real_verify, revision_min)
        with pytest.raises(TrustError, match=f"revision {due} is due"):
            restored.accept_head(run.signed_head(1), run.now_ms)


def test_the_operators_minimum_version_holds_after_a_restart(run: Any, real_verify: Any) -> None:
    restored = Trust.restore(run.trust().save(), run.run_id, real_verify, version_min=Version(0, 9))
    with pytest.raises(TrustError, match="rollback"):
        restored.accept_head(run.signed_head(8), run.now_ms)


def test_a_damaged_state_is_never_restored(run: Any, full: Trust, real_verify: Any) -> None:
    saved = full.save()
    with pytest.raises(StorageError):
        Trust.restore(saved[:-1], run.run_id, real_verify)
    with pytest.raises(StorageError):
        Trust.restore(b"", run.run_id, real_verify)
    with pytest.raises(StorageError):
        Trust.restore(saved, compute_digest(b"another run"), real_verify)
    assert full.head_record is not None
    signature = full.head_record.signatures[0]
    assert saved.count(signature) >= 1
    flipped = signature[:5] + bytes([signature[5] ^ 1]) + signature[6:]
    with pytest.raises(StorageError, match="signature"):
        Trust.restore(saved.replace(signature, flipped), run.run_id, real_verify)


def test_a_proof_that_proves_nothing_is_not_restored(run: Any, full: Trust, real_verify: Any) -> None:
    assert full.fork is not None
    full._fork = type(full.fork)(full.fork.version, full.fork.first, full.fork.first)
    with pytest.raises(StorageError, match="proves nothing"):
        Trust.restore(full.save(), run.run_id, real_verify)


def test_half_a_proof_is_not_restored(run: Any, full: Trust, real_verify: Any) -> None:
    state = decode_value(_State, full.save())
    with pytest.raises(StorageError, match="proves nothing"):
        Trust.restore(encode_value(replace(state, fork=state.fork[:1])), run.run_id, real_verify)


def test_a_state_of_another_format_is_not_restored(run: Any, full: Trust, real_verify: Any) -> None:
    saved = full.save()
    assert saved.count(b"\xa6format\x01") == 1
    with pytest.raises(StorageError, match="format 2"):
        Trust.restore(saved.replace(b"\xa6format\x01", b"\xa6format\x02"), run.run_id, real_verify)


def test_before_the_genesis_nobody_is_refused_and_nothing_counts(run: Any, real_verify: Any) -> None:
    empty = Beliefs(run.run_id, real_verify)
    head, signer = run.head(1), run.publisher.peer_id
    assert empty.number_max == 0
    assert empty.admits(signer)
    assert empty.binds(head, signer)
    assert not empty.epoch_is_endorsed


def test_of_several_epochs_the_newest_is_in_force(run: Any) -> None:
    trust = run.trust()
    first, second = run.epoch(1, 5), run.epoch(2, 9, kept_version=Version(1, 8))
    trust.accept_epoch(run.sign(first, run.owner))
    signed = run.sign(second, run.publisher, run.second)
    trust.accept_epoch(signed)
    assert (trust.epoch, trust.epoch_record, trust.epoch_digest) == (2, second, record_digest(signed))


@pytest.mark.parametrize("signers", [("owner",), ("owner", "publisher", "second"), ("publisher", "second")])
def test_an_epoch_stays_endorsed_while_all_its_signers_do(run: Any, signers: tuple[str, ...]) -> None:
    trust = run.trust()
    trust.accept_epoch(run.sign(run.epoch(1, 5), run.publisher, run.second))
    trust.accept_epoch(run.sign(run.epoch(2, 9), *(getattr(run, name) for name in signers)))
    assert trust.epoch_is_endorsed
    trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,)))
    assert trust.epoch_is_endorsed is ("publisher" not in signers)


def test_too_few_signers_that_stay_endorse_nothing(run: Any) -> None:
    trust = run.trust()
    trust.accept_epoch(run.sign(run.epoch(1, 5), run.publisher, run.second))
    more = tuple(sorted(key.peer_id for key in (run.publisher, run.second, run.trainer, run.stranger)))
    trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=more))
    assert not trust.epoch_is_endorsed


def test_a_head_of_a_revoked_key_binds_until_the_owners_order(run: Any) -> None:
    trust = run.trust()
    revoked, stays = run.publisher.peer_id, run.second.peer_id
    trust.accept_epoch(run.sign(run.epoch(1, 5), run.owner))
    trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(stays,)))
    trust.accept_epoch(run.sign(run.epoch(2, 9, revision=1), run.second))
    assert trust.binds(run.head(7), revoked), "no owner said where to go on"
    trust.accept_epoch(run.sign(run.epoch(3, 12, revision=1), run.owner))
    assert not trust.binds(run.head(7), revoked)
    assert trust.binds(run.head(7), stays)
    assert trust.binds(run.head(7, revision=1), revoked)


def test_an_empty_state_of_another_run_is_not_restored(run: Any, make_run: Any, real_verify: Any) -> None:
    other = Beliefs(make_run(name="other").run_id, real_verify)
    with pytest.raises(StorageError, match="of format 1 and run"):
        Beliefs.restore(other.save(), run.run_id, real_verify)


def test_without_an_epoch_record_every_head_binds_and_the_run_is_endorsed(run: Any) -> None:
    trust = run.trust()
    assert trust.epoch_is_endorsed
    assert trust.binds(run.head(1), run.stranger.peer_id)


def test_a_head_of_the_epoch_before_is_not_in_force(run: Any) -> None:
    trust = run.trust()
    assert trust.head_in_force is None
    head = trust.accept_head(run.signed_head(4), run.now_ms)
    assert trust.head_in_force == head
    assert not trust.stale(head.valid_until_ms - 1)
    assert trust.stale(head.valid_until_ms)
    trust.accept_epoch(run.sign(run.epoch(1, 5), run.owner))
    assert trust.head_in_force is None
    assert trust.stale(run.now_ms)
