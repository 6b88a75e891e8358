"""Which root each version was said to have, and by whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.evidence import EVIDENCE_VERSIONS_MAX, Evidence, claimant_type, claims_of, find_contradiction
from pulsenet.chain.records import Catalogue, EpochRecord, Head, Manifest
from pulsenet.ids import Version, compute_digest

OTHER = compute_digest(b"other")


def test_every_record_claims_the_roots_it_names(run: Any) -> None:
    assert list(claims_of(run.head(5))) == [Version(0, 5)]
    assert list(claims_of(run.manifest(5))) == [Version(0, 5), Version(0, 4)]
    assert list(claims_of(run.manifest(1))) == [Version(0, 1)]
    assert list(claims_of(run.catalogue(run.manifest(1), run.manifest(2)))) == [Version(0, 1), Version(0, 2)]
    assert list(claims_of(run.epoch(1, 9))) == [Version(0, 8)]
    assert claims_of(run.epoch(1, 9, kept_version=None, kept_root=None)) == {}


def test_a_record_is_opened_as_what_it_says_it_is(run: Any) -> None:
    types = {"epoch": EpochRecord, "head": Head, "catalogue": Catalogue, "manifest": Manifest, "vote": Manifest}
    for name, cls in types.items():
        assert claimant_type(replace(run.signed_head(1), type=name)) is cls


@pytest.mark.parametrize("kind", ["head", "manifest"])
def test_different_roots_of_one_version_contradict(run: Any, kind: str) -> None:
    make = getattr(run, kind)
    assert find_contradiction(make(5), run.manifest(5, root=OTHER)) == Version(0, 5)
    assert find_contradiction(make(5), run.manifest(5)) is None
    assert find_contradiction(make(5), run.head(7, root=OTHER)) is None


def test_two_records_of_one_epoch_contradict(run: Any) -> None:
    assert find_contradiction(run.epoch(1, 9), run.epoch(1, 12)) == Version(1, 12)
    assert find_contradiction(run.epoch(1, 9), run.epoch(1, 9)) is None
    assert find_contradiction(run.epoch(1, 9), run.epoch(2, 12)) is None


def test_the_first_claim_stays_and_a_manifest_takes_a_catalogues_place(run: Any) -> None:
    evidence = Evidence(0)
    catalogue, manifest = run.catalogue(run.manifest(1)), run.manifest(1)
    signed_catalogue, signed_manifest = run.sign(catalogue, run.publisher), run.sign(manifest, run.publisher)
    evidence.remember(catalogue, signed_catalogue)
    assert evidence.records() == (signed_catalogue,)
    evidence.remember(manifest, signed_manifest)
    assert evidence.records() == (signed_manifest,)
    evidence.remember(catalogue, signed_catalogue)
    assert evidence.records() == (signed_manifest,)
    assert evidence.root_of(Version(0, 1)) == manifest.root
    assert evidence.root_of(Version(0, 2)) is None
    assert evidence.find_fork(run.head(1), run.signed_head(1)) is None
    assert evidence.find_fork(run.head(2), run.signed_head(2)) is None
    head = run.signed_head(1, root=OTHER)
    proof = evidence.find_fork(run.head(1, root=OTHER), head)
    assert proof is not None
    assert (proof.version, proof.first, proof.second) == (Version(0, 1), signed_manifest, head)


def test_other_epochs_leave_no_evidence(run: Any) -> None:
    evidence = Evidence(1)
    evidence.remember(run.head(5), run.signed_head(5))
    assert evidence.records() == ()
    assert evidence.find_fork(run.head(5, root=OTHER), run.signed_head(5)) is None


def test_only_the_newest_versions_are_remembered(run: Any) -> None:
    evidence = Evidence(0)
    signed = run.signed_head(1)
    for number in range(1, EVIDENCE_VERSIONS_MAX + 11):
        evidence.remember(run.head(number), signed)
    assert evidence.root_of(Version(0, 10)) is None
    assert evidence.root_of(Version(0, 11)) is not None


def test_an_epoch_record_and_another_contradict_about_the_version_that_is_kept(run: Any) -> None:
    kept = run.epoch(1, 9)
    for other in (run.head(8, root=OTHER), run.manifest(8, root=OTHER), run.manifest(9, base_root=OTHER)):
        assert find_contradiction(kept, other) == Version(0, 8)
        assert find_contradiction(other, kept) == Version(0, 8)
    assert find_contradiction(kept, run.head(8)) is None


def test_of_several_contradictions_the_newest_is_named(run: Any) -> None:
    known, other = run.catalogue(run.manifest(4), run.manifest(5)), run.manifest(5, root=OTHER, base_root=OTHER)
    assert find_contradiction(known, other) == find_contradiction(other, known) == Version(0, 5)
    evidence = Evidence(0)
    evidence.remember(other, run.sign(other, run.publisher))
    proof = evidence.find_fork(known, run.sign(known, run.publisher))
    assert proof is not None
    assert proof.version == Version(0, 5)


def test_the_oldest_are_forgotten_and_records_ascend_in_whatever_order_they_came(run: Any) -> None:
    evidence = Evidence(0)
    numbers = range(EVIDENCE_VERSIONS_MAX + 1, 0, -1)
    heads = {number: run.signed_head(number) for number in numbers}
    for number in numbers:
        evidence.remember(run.head(number), heads[number])
    assert evidence.root_of(Version(0, 1)) is None
    assert evidence.records() == tuple(heads[number] for number in sorted(heads) if number > 1)
