"""What a node keeps and what it may release (docs/adr/0001).

Everything here works on entries that are already committed. So a new anchor counts only once it is durable,
and at every moment what is kept holds a full way to the newest version it held before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.plan import plan_route
from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind
from pulsenet.chain.rules import entry_key
from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.ids import RunId, Version

ROLES = ("trainer", "seed", "inferencer")


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """How much a node keeps."""

    anchors_kept: int = 2
    """Newest anchors kept by a publisher or seed; at least 1."""
    entries_max: int = limits.CATALOGUE_ENTRIES_MAX
    """A catalogue names no more than this."""
    size_bytes_max: int | None = None
    """Sum of encoded sizes, or ``None`` for no limit. A trainer's route to its newest version ignores it."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The verdict on a set of entries; both in the order of a catalogue, and disjoint."""

    keep: tuple[CatalogueEntry, ...]
    release: tuple[CatalogueEntry, ...]


def retained(
    entries: Iterable[CatalogueEntry],
    role: str,
    retention_limits: RetentionLimits | None = None,
    *,
    mirror: Version | None = None,
) -> Retention:
    """Split entries into those to keep and those to release.

    * ``trainer``: the newest anchors, every patch and skip that ends after the older of them (the ladder
      included), and always a whole route from an anchor to the newest version, whatever the limits.
    * ``seed``: the same set, newest first, as far as the limits allow.
    * ``inferencer``: the route by which ``mirror`` is rebuilt after a crash (the anchor it came by and the hops
      since) if that fits, then patches, newest first; older anchors go once a newer one is held.

    Args:
        entries: A publisher's catalogue, or the manifests whose blobs this node holds.
        mirror: Version the local mirror holds; used for an inferencer only.

    Raises:
        LocalProtocolError: ``role`` is none of the three.
    """
    if role not in ROLES:
        raise LocalProtocolError(f"no retention rule for role {role!r}")
    chosen_limits = RetentionLimits() if retention_limits is None else retention_limits
    ordered = sorted(set(entries), key=entry_key)
    candidates = _candidates(ordered, 1 if role == "inferencer" else chosen_limits.anchors_kept)
    essential: Sequence[CatalogueEntry] = ()
    if role == "trainer" and candidates:
        essential = _route_to(candidates[-1].version, candidates)
    elif role == "inferencer" and mirror is not None:
        essential = _route_to(mirror, candidates)
        if not _fits(essential, chosen_limits):
            essential = ()
    keep = _fill(essential, candidates, chosen_limits)
    return Retention(
        keep=tuple(entry for entry in ordered if entry in keep),
        release=tuple(entry for entry in ordered if entry not in keep),
    )


def due_skip_bases(version: Version, first_number: int) -> tuple[Version, ...]:
    """Return the base versions of the skip patches due at ``version``, longest span last.

    A span is due at its multiples, so neighbouring skips of one span join up.

    Args:
        first_number: Smallest number of this epoch that a skip may start from.
    """
    return tuple(
        Version(version.epoch, version.number - span)
        for span in limits.SKIP_LADDER
        if version.number % span == 0 and version.number - span >= first_number
    )


def is_anchor_due(
    version: Version, newest_anchor: Version | None, anchor_interval: int, *, is_aligned: bool = False
) -> bool:
    """Say whether ``version`` is to be stored as an anchor too.

    The first version of a run or epoch is; after that, every ``anchor_interval`` numbers.

    Args:
        is_aligned: Count the numbers from 0 and not from the newest anchor: several publishers of one run then make
            the same anchors, whenever each began.
    """
    if newest_anchor is None or newest_anchor.epoch != version.epoch:
        return True
    interval = max(anchor_interval, 1)
    if is_aligned:
        return version.number // interval > newest_anchor.number // interval
    return version.number - newest_anchor.number >= interval


def _candidates(ordered: Sequence[CatalogueEntry], anchors_kept: int) -> list[CatalogueEntry]:
    anchors = sorted({entry.version for entry in ordered if entry.kind is Kind.ANCHOR}, reverse=True)
    if not anchors:
        return list(ordered)
    oldest = anchors[: max(anchors_kept, 1)][-1]
    return [
        entry for entry in ordered if entry.version > oldest or (entry.kind is Kind.ANCHOR and entry.version == oldest)
    ]


def _route_to(version: Version, candidates: Sequence[CatalogueEntry]) -> Sequence[CatalogueEntry]:
    catalogue = Catalogue(run_id=RunId(b""), epoch=version.epoch, entries=tuple(candidates))
    try:
        return plan_route(None, version, catalogue)
    except UnavailableError:
        return ()


def _fits(essential: Sequence[CatalogueEntry], retention_limits: RetentionLimits) -> bool:
    size_bytes = sum(entry.encoded_size_bytes for entry in essential)
    within_size = retention_limits.size_bytes_max is None or size_bytes <= retention_limits.size_bytes_max
    return within_size and len(essential) <= retention_limits.entries_max


def _fill(
    essential: Sequence[CatalogueEntry], candidates: Sequence[CatalogueEntry], retention_limits: RetentionLimits
) -> set[CatalogueEntry]:
    """Add candidates to the essential ones, newest first, while they fit."""
    keep = set(essential)
    size_bytes = sum(entry.encoded_size_bytes for entry in keep)
    # Patches before the anchor of the same version: they serve the many who are up to date.
    for entry in sorted(candidates, key=lambda entry: (entry.version, entry.kind is not Kind.ANCHOR), reverse=True):
        if entry in keep or len(keep) >= retention_limits.entries_max:
            continue
        if (
            retention_limits.size_bytes_max is not None
            and size_bytes + entry.encoded_size_bytes > retention_limits.size_bytes_max
        ):
            continue
        keep.add(entry)
        size_bytes += entry.encoded_size_bytes
    return keep
