"""The cheapest way from what is held to a target version.

A catalogue is a graph: patches and skips lead from their base version to their version, anchors lead from
nothing to their version. The planner finds the path with the fewest bytes; ties go to fewer hops, then to
the order of the catalogue, so that equal inputs give equal routes on every node.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection

from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind
from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, Version

Route = tuple[CatalogueEntry, ...]


def plan_route(
    held: Version | None,
    target: Version,
    catalogue: Catalogue,
    *,
    held_root: Digest | None = None,
    avoid: Collection[Digest] = frozenset(),
) -> Route:
    """Return the hops to apply in order, cheapest by encoded bytes; empty if ``target`` is already held.

    Args:
        held: Version of the local mirror, or ``None`` if there is none that may be built upon.
        held_root: Root of the mirror. If the catalogue names another root for ``held``, what is held lies on a
            history that was cut off, and the route starts from an anchor.
        avoid: Manifest digests that must not be used, because they failed or nobody has their bytes.

    Raises:
        UnavailableError: no hops of the catalogue lead to ``target``; the message says what is missing.
    """
    start = None if _is_cut_off(held, held_root, catalogue) else held
    outgoing: dict[Version | None, list[CatalogueEntry]] = defaultdict(list)
    for entry in catalogue.entries:
        if entry.manifest_digest not in avoid and _leads_forward(entry):
            outgoing[entry.base_version].append(entry)
    route = _search(start, target, outgoing)
    if route is None:
        raise UnavailableError(_explain(start, target, catalogue, outgoing))
    return route


def _is_cut_off(held: Version | None, held_root: Digest | None, catalogue: Catalogue) -> bool:
    if held_root is None:
        return False
    roots = {entry.root for entry in catalogue.entries if entry.version == held}
    return bool(roots) and held_root not in roots


def _leads_forward(entry: CatalogueEntry) -> bool:
    """Refuse entries whose kind and base disagree, and patches that would not move forward."""
    if entry.kind is Kind.ANCHOR:
        return entry.base_version is None
    return entry.base_version is not None and entry.base_version < entry.version


def _search(
    start: Version | None, target: Version, outgoing: dict[Version | None, list[CatalogueEntry]]
) -> Route | None:
    """Dijkstra from ``start`` and from nothing; both cost no bytes to stand on."""
    best: dict[Version | None, tuple[int, int]] = {start: (0, 0), None: (0, 0)}
    arrived_by: dict[Version, CatalogueEntry] = {}
    # The order number keeps versions out of the comparison and makes ties follow the catalogue's order.
    queue: list[tuple[int, int, int, Version | None]] = [
        (0, 0, order, origin) for order, origin in enumerate(dict.fromkeys((start, None)))
    ]
    order = len(queue)
    while queue:
        size_bytes, hop_count, _, version = heapq.heappop(queue)
        if version == target:
            return _walk_back(target, start, arrived_by)
        if (size_bytes, hop_count) > best[version]:
            continue  # a cheaper way was found meanwhile, and has gone on already
        for entry in outgoing.get(version, ()):
            cost = (size_bytes + entry.encoded_size_bytes, hop_count + 1)
            known = best.get(entry.version)
            if known is None or cost < known:
                best[entry.version] = cost
                arrived_by[entry.version] = entry
                heapq.heappush(queue, (*cost, order, entry.version))
                order += 1
    return None


def _walk_back(target: Version, start: Version | None, arrived_by: dict[Version, CatalogueEntry]) -> Route:
    hops: list[CatalogueEntry] = []
    version: Version | None = target
    while version is not None and version != start:
        entry = arrived_by[version]
        hops.append(entry)
        version = entry.base_version
    return tuple(reversed(hops))


def _explain(
    start: Version | None,
    target: Version,
    catalogue: Catalogue,
    outgoing: dict[Version | None, list[CatalogueEntry]],
) -> str:
    if all(entry.version != target for entry in catalogue.entries):
        return f"no_target: the catalogue names no way to {target}"
    if start is None:
        return f"no_anchor: no anchor leads to {target}"
    if not outgoing.get(start):
        return f"base_mismatch: nothing leads on from {start}, and no anchor leads to {target}"
    return f"chain_hole: the hops from {start} stop short of {target}, and no anchor leads there"
