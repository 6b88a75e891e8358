"""A draft holds exactly what one commit makes true."""

from __future__ import annotations

from typing import Any

from pulsenet.chain.records import Kind, Manifest
from pulsenet.chain.rules import check_record
from pulsenet.chain.signing import encode_signed, open_record, record_digest
from pulsenet.ids import Digest, Version
from pulsenet.node.draft import Draft, Encoding, draft_extra, draft_version
from pulsenet.node.effects import EncodeSkip, StoreAnchor
from pulsenet.node.events import AnchorStored, PatchEncoded, SkipEncoded, SnapshotOffered
from pulsenet.node.published import PublishedState
from pulsenet.node.scribe import Scribe

TABLE = Digest(b"t" * 32)


def draft(
    run: Any,
    version: Version,
    before: PublishedState | None = None,
    *,
    kind: Kind | None = None,
    epoch: Any = None,
    consensus: bool = True,
) -> Draft:
    scribe = Scribe(run.trust(), run.publisher.peer_id, run.publisher.sign)
    chosen = kind or (Kind.ANCHOR if before is None else Kind.PATCH)
    encoding = Encoding(SnapshotOffered(7, version.number - 1, TABLE, consensus), chosen)
    root, blob = run.digest(f"root {version}"), run.digest(f"blob {version}")
    encoded = PatchEncoded(7, blob, 2, root, 2_000, 30, 9, 1_000)
    return draft_version(scribe, encoding, encoded, before=before, version=version, epoch=epoch, term=4)


def test_a_first_version_is_an_anchor_on_nothing(run: Any) -> None:
    made = draft(run, Version(0, 1))
    manifest = open_record(Manifest, made.signed, run.verify, run_id=run.run_id)
    assert manifest == made.manifest
    assert (manifest.kind, manifest.term, manifest.base_version, manifest.previous) == (Kind.ANCHOR, 4, None, None)
    assert (made.generation, made.epoch, made.is_fresh) == (7, None, True)
    assert made.state.manifest_digest == record_digest(made.signed)


def test_the_next_version_goes_on_from_what_is_committed(run: Any) -> None:
    first = draft(run, Version(0, 1))
    second = draft(run, Version(0, 2), first.state)
    assert (second.manifest.kind, second.manifest.base_root) == (Kind.PATCH, first.manifest.root)
    assert second.manifest.previous == record_digest(first.signed)
    assert not second.is_fresh
    assert [item.entry.version.number for item in second.state.retained] == [1, 2]


def test_a_version_that_leaves_numbers_out_is_a_skip(run: Any) -> None:
    first = draft(run, Version(0, 1))
    leap = draft(run, Version(0, 5), first.state)
    assert (leap.manifest.kind, leap.manifest.base_version) == (Kind.SKIP, Version(0, 1))
    assert leap.state.unbroken_from == 1
    check_record(leap.manifest)
    run.trust().accept_manifest(leap.signed)


def test_an_anchor_inside_the_epoch_keeps_what_came_before(run: Any) -> None:
    first = draft(run, Version(0, 1))
    anchor = draft(run, Version(0, 2), first.state, kind=Kind.ANCHOR)
    assert (anchor.manifest.kind, anchor.manifest.base_version) == (Kind.ANCHOR, None)
    assert anchor.manifest.previous == record_digest(first.signed)
    assert len(anchor.state.retained) == 2


def test_a_new_epoch_keeps_nothing_and_carries_its_record(run: Any) -> None:
    first = draft(run, Version(0, 1))
    opened = run.epoch(1, 2, Version(0, 1))
    made = draft(run, Version(1, 2), first.state, kind=Kind.ANCHOR, epoch=opened)
    assert made.epoch == opened
    assert made.state.epoch_record == encode_signed(opened)
    assert (made.manifest.previous, len(made.state.retained), made.is_fresh) == (None, 1, False)


def test_extras_lead_to_the_committed_version(run: Any) -> None:
    scribe = Scribe(run.trust(), run.publisher.peer_id, run.publisher.sign)
    state = draft(run, Version(0, 3), draft(run, Version(0, 2), draft(run, Version(0, 1)).state).state).state
    skip, anchor = EncodeSkip(Version(0, 1), Version(0, 3)), StoreAnchor(Version(0, 3))
    encoded = SkipEncoded(Version(0, 1), Version(0, 3), run.digest("skip"), 1, 50, 15)
    stored = AnchorStored(Version(0, 3), run.digest("anchor"), 2_000)
    by_skip = draft_extra(scribe, state, skip, encoded, term=4)
    assert by_skip is not None
    assert (by_skip.manifest.kind, by_skip.manifest.term, by_skip.manifest.changed_count) == (Kind.SKIP, 4, 15)
    assert (by_skip.generation, by_skip.state.version) == (None, state.version)
    by_anchor = draft_extra(scribe, state, anchor, stored, term=4)
    assert by_anchor is not None
    check_record(by_skip.manifest)
    check_record(by_anchor.manifest)
    assert (by_anchor.manifest.kind, by_anchor.manifest.changed_count) == (Kind.ANCHOR, state.element_count)
    assert draft_extra(scribe, state, anchor, encoded, term=4) is None
    assert draft_extra(scribe, state, skip, stored, term=4) is None
    late = AnchorStored(Version(0, 2), run.digest("anchor"), 2_000)
    assert draft_extra(scribe, state, anchor, late, term=4) is None


def test_what_is_no_consensus_says_so_in_every_manifest_of_its_version(run: Any) -> None:
    first = draft(run, Version(0, 1), consensus=False)
    manifest = open_record(Manifest, first.signed, run.verify, run_id=run.run_id)
    assert not manifest.consensus
    again = PublishedState.restore(first.state.encode())
    scribe = Scribe(run.trust(), run.publisher.peer_id, run.publisher.sign)
    asked, stored = StoreAnchor(Version(0, 1)), AnchorStored(Version(0, 1), run.digest("anchor"), 2_000)
    extra = draft_extra(scribe, again, asked, stored, term=4)
    assert extra is not None
    assert not extra.manifest.consensus
    assert draft(run, Version(0, 2), first.state).manifest.consensus, "the next one is a mean again"
