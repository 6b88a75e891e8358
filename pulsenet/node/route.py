"""What to build upon and by which hops: the planner with a memory of what failed."""

from __future__ import annotations

from pulsenet.chain.plan import Route, plan_route
from pulsenet.chain.records import Catalogue, CatalogueEntry, Head, Kind
from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, Version

HOP_TRIES_MAX = 3
"""Failures after which a manifest is left out of every route of this catalogue's lifetime."""

UNAVAILABLE_SECONDS = 60.0
"""How long a blob that nobody had is left out of new routes, if there is another way."""

REASONS_THAT_KEEP_THE_MIRROR = frozenset({"enospc", "memory"})
"""Failures of the environment: neither the mirror nor the manifest is in doubt."""

REASONS_THAT_BLAME_THE_BLOB = frozenset({"decode", "structure"})
"""Failures of what was signed: the mirror is what it was."""

FAILURES_MAX = 1_024
"""Manifests remembered as failing."""


class Router:
    """The mirror's version, the hops still to go, and which of them to avoid. Pure.

    Args:
        held: Version and root the mirror holds, or ``None``.
    """

    def __init__(self, held: Version | None, held_root: Digest | None) -> None:
        self.held = held
        self.held_root = held_root
        self.route: Route = ()
        self.reason = ""
        """Why there is no route: a stable code, or empty."""
        self._from_anchor = False
        self._failures: dict[Digest, int] = {}
        self._unavailable_until: dict[Digest, float] = {}
        self._environment_failures = 0
        self._planned_for: tuple[object, ...] | None = None

    @property
    def next_hop(self) -> CatalogueEntry | None:
        """The hop to apply next."""
        return self.route[0] if self.route else None

    def plan(self, head: Head, catalogue: Catalogue, refused: frozenset[Digest], now: float) -> bool:
        """Plan to the newest version if anything the plan depends on changed; say whether it did."""
        unavailable = frozenset(digest for digest, until in self._unavailable_until.items() if until > now)
        key = (
            head.version,
            head.catalogue_digest,
            self.held,
            self.held_root,
            self._from_anchor,
            refused,
            unavailable,
            tuple(self._failures.items()),
        )
        if key == self._planned_for:
            return False
        self._planned_for = key
        self._unavailable_until = {d: until for d, until in self._unavailable_until.items() if until > now}
        hopeless = refused | {digest for digest, count in self._failures.items() if count >= HOP_TRIES_MAX}
        # A blob that nobody has now may turn up: leave it out only where another way exists.
        for avoid in dict.fromkeys((hopeless | unavailable, hopeless)):
            try:
                self.route = plan_route(
                    None if self._from_anchor else self.held,
                    head.version,
                    catalogue,
                    held_root=self.held_root,
                    avoid=avoid,
                )
            except UnavailableError as error:
                self.route = ()
                self.reason = str(error).partition(":")[0]
            else:
                self.reason = ""
                break
        return True

    def is_at(self, head: Head) -> bool:
        """Say whether the mirror holds exactly what the head names."""
        return not self._from_anchor and (self.held, self.held_root) == (head.version, head.root)

    def note_applied(self, entry: CatalogueEntry) -> None:
        """The mirror was moved along ``entry`` and its root held."""
        self.held, self.held_root = entry.version, entry.root
        self._failures.pop(entry.manifest_digest, None)
        self._environment_failures = 0
        if entry.kind is Kind.ANCHOR:
            self._from_anchor = False
        if self.route and self.route[0] == entry:
            self.route = self.route[1:]

    def note_failed(self, entry: CatalogueEntry, reason: str, mirror: Version | None) -> int:
        """A hop was undone and the mirror holds ``mirror``; return how often this hop has failed."""
        if mirror != self.held:
            self.held, self.held_root = mirror, None
        if reason in REASONS_THAT_KEEP_THE_MIRROR:
            self._environment_failures += 1
            return self._environment_failures
        # A blob that is whole and cannot be read is its signer's fault. Otherwise the mirror's bytes are in doubt,
        # whatever it calls itself: build anew from an anchor.
        if reason not in REASONS_THAT_BLAME_THE_BLOB:
            # Until a new route is planned, for which a catalogue must be here, the old one would only fail again.
            self._from_anchor, self.route = True, ()
        count = self._failures.pop(entry.manifest_digest, 0) + 1
        self._failures[entry.manifest_digest] = count
        if len(self._failures) > FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
        return count

    def note_unavailable(self, entry: CatalogueEntry, now: float) -> None:
        """Nobody has this blob at present."""
        if self._unavailable_until.get(entry.manifest_digest, 0.0) <= now:
            self._unavailable_until[entry.manifest_digest] = now + UNAVAILABLE_SECONDS

    def forget_failures(self, catalogue: Catalogue) -> None:
        """Forget what failed of manifests that the catalogue no longer names."""
        named = {entry.manifest_digest for entry in catalogue.entries}
        self._failures = {digest: count for digest, count in self._failures.items() if digest in named}
