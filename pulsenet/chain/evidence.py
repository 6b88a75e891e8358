"""Which root each version was said to have, and by whom: how a fork is found and proved (SPEC section 6.5).

Every signed record makes *claims*: a manifest names the root of its version and of its base, a head that of
the newest version, a catalogue those of all it lists. Two records of authorities whose claims about one version
differ prove a fork, whatever their types, and so do two different records that open one epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from pulsenet.chain.records import Catalogue, EpochRecord, Head, Manifest, SignedRecord
from pulsenet.ids import Digest, Version

Claimant = EpochRecord | Manifest | Catalogue | Head
"""Records that say which root a version has."""

_CLAIMANTS: Final[dict[str, type[Claimant]]] = {cls.TYPE: cls for cls in get_args(Claimant)}

EVIDENCE_VERSIONS_MAX: Final = 128
"""Versions whose first claim is remembered; older ones can only be rolled back to, which is refused anyway."""


@dataclass(frozen=True, slots=True)
class ForkProof:
    """Two signed records that contradict each other about ``version``."""

    version: Version
    first: SignedRecord
    second: SignedRecord


def claimant_type(signed: SignedRecord) -> type[Claimant]:
    """Return as what to open a record that claims something; any other is no manifest, which opening it says."""
    return _CLAIMANTS.get(signed.type, Manifest)


def claims_of(record: Claimant) -> dict[Version, Digest]:
    """Return every version the record names, with the root it gives it."""
    if isinstance(record, Head):
        return {record.version: record.root}
    if isinstance(record, Catalogue):
        return {entry.version: entry.root for entry in record.entries}
    if isinstance(record, Manifest):
        return {record.version: record.root, **_claim_of(record.base_version, record.base_root)}
    return _claim_of(record.kept_version, record.kept_root)


def _claim_of(version: Version | None, root: Digest | None) -> dict[Version, Digest]:
    """Return what a record says of a version that it may name."""
    if version is None:
        return {}
    assert root is not None, "the rules of both records ask for it"
    return {version: root}


def find_contradiction(first: Claimant, second: Claimant) -> Version | None:
    """Return the newest version about which two records disagree, or ``None``."""
    if isinstance(first, EpochRecord) and isinstance(second, EpochRecord):
        differ = first.epoch == second.epoch and first != second
        return Version(first.epoch, max(first.first_number, second.first_number)) if differ else None
    second_claims = claims_of(second)
    differing = [version for version, root in claims_of(first).items() if second_claims.get(version, root) != root]
    return max(differing, default=None)


class Evidence:
    """The first claim about each of the newest versions of one epoch, with the record that made it."""

    __slots__ = ("_claims", "_epoch")

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._claims: dict[Version, tuple[Digest, SignedRecord]] = {}

    def find_fork(self, record: Claimant, signed: SignedRecord) -> ForkProof | None:
        """Return a proof if the record contradicts an earlier one; remembers nothing."""
        for version, root in self._claims_here(record):
            known = self._claims.get(version)
            if known is not None and known[0] != root:
                return ForkProof(version, known[1], signed)
        return None

    def remember(self, record: Claimant, signed: SignedRecord) -> None:
        """Keep what an accepted record claims."""
        for version, root in self._claims_here(record):
            # A manifest is small and lasts; it takes the place of the catalogue that vouched for it.
            if version not in self._claims or isinstance(record, Manifest):
                self._claims[version] = (root, signed)
        for version in sorted(self._claims)[:-EVIDENCE_VERSIONS_MAX]:
            del self._claims[version]

    def _claims_here(self, record: Claimant) -> list[tuple[Version, Digest]]:
        claims = claims_of(record)
        return [(version, claims[version]) for version in sorted(claims, reverse=True) if version.epoch == self._epoch]

    def root_of(self, version: Version) -> Digest | None:
        """Return the root claimed for a version, if it is remembered."""
        known = self._claims.get(version)
        return None if known is None else known[0]

    def records(self) -> tuple[SignedRecord, ...]:
        """Return each record that made a remembered claim once, in the order of the versions."""
        return tuple(dict.fromkeys(self._claims[version][1] for version in sorted(self._claims)))
