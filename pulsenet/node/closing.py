"""Which contributions a round counts, and when it is closed (SPEC section 6.9 and 6.10)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from pulsenet.chain.ledger import ContributionEntry
from pulsenet.chain.records import Member, Rejection
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.ids import Digest, PeerId
from pulsenet.outer.checks import compute_scales
from pulsenet.outer.floats import fp32_from_bits, fp32_to_bits

REFUSED_WAITS = 10
"""How many times the usual wait a round is kept open for whoever is silent, where a contribution was refused and too
few count: who is connected may still be in its inner steps, and may as well have no training process."""

REJECTIONS_MAX = 256
"""Rejections listed by one receipt, so that it stays within its size."""

MEMBERS_MAX = 1_024


def choose_scales(norms: Mapping[PeerId, float], ratio: float) -> dict[PeerId, int]:
    """Return what each contribution is multiplied by, as FP32 bits (spec-outer, "Clipping").

    Only the coordinator computes this: everybody else takes the receipt's bits.
    """
    scales = compute_scales(list(norms.values()), clip_norm_ratio=ratio)
    return {peer_id: fp32_to_bits(float(scale)) for peer_id, scale in zip(norms, scales, strict=True)}


@dataclass(slots=True)
class Collection:
    """The contributions to the round that is open, at its coordinator."""

    round_index: int
    base_state_root: Digest
    refused_waits: int = REFUSED_WAITS
    """How many times the usual wait it is open once a contribution was refused."""
    found: dict[PeerId, tuple[Digest, ContributionEntry]] = field(default_factory=dict)
    reasons: dict[PeerId, str] = field(default_factory=dict)
    """Why each checked contribution is refused; empty for one that counts."""
    asked: set[PeerId] = field(default_factory=set)
    """Contributions whose content is being checked."""
    enough_at: float | None = None
    """When the least number of checked contributions was there."""
    refused_at: float | None = None
    """When a contribution was refused, whose sender can do nothing more before the next round."""
    short_at: float | None = None
    """When everybody expected was decided and too few of them counted, because others were refused."""

    def add(self, peer_id: PeerId, digest: Digest, entry: ContributionEntry) -> None:
        """Take in a contribution to this round; one that started from another state needs no look inside."""
        if peer_id in self.found:
            return
        self.found[peer_id] = (digest, entry)
        if entry.contribution.base_state_root != self.base_state_root:
            self.reasons[peer_id] = "base"

    def refuse_other_shapes(self, element_count: int) -> None:
        """Reject what is of another number of elements than the run's state; it may be large, and needs no fetching."""
        for peer_id, (_, entry) in self.undecided().items():
            if entry.contribution.element_count != element_count:
                self.reasons[peer_id] = "shape"

    def decide(self, digest: Digest, reason: str) -> None:
        """Note what the check of a contribution found."""
        for peer_id, (found, _) in self.found.items():
            if found == digest:
                self.reasons.setdefault(peer_id, reason)

    def undecided(self) -> dict[PeerId, tuple[Digest, ContributionEntry]]:
        """Return what is not checked yet."""
        return {peer_id: item for peer_id, item in self.found.items() if peer_id not in self.reasons}

    @property
    def counted(self) -> list[PeerId]:
        """Who counts, ascending."""
        return sorted(peer_id for peer_id, reason in self.reasons.items() if not reason)[:MEMBERS_MAX]

    def is_complete(self, expected: Set[PeerId], settings: RoundSettings, now: float) -> bool:
        """Say whether the round can be closed now: everybody expected is decided, or waited for long enough."""
        count = len(self.counted)
        if count >= settings.contributions_min and self.enough_at is None:
            self.enough_at = now
        is_refused = any(self.reasons.values())
        if is_refused and self.refused_at is None:
            self.refused_at = now
        if expected <= set(self.reasons) and not self.undecided():
            # If all were refused, the round ends without moving the state, and they may try the next.
            if count >= settings.contributions_min or (count == 0 and bool(self.reasons)):
                return True
            # Whoever was refused sends nothing else in this round: without others, it ends in the same way.
            if is_refused and self.short_at is None:
                self.short_at = now
        ends_at = self.ends_at(settings)
        return ends_at is not None and now >= ends_at

    def ends_at(self, settings: RoundSettings) -> float | None:
        """Return when the round is closed without whoever is missing; ``None`` while it waits without end."""
        wait_seconds = settings.contribution_wait_seconds
        if self.enough_at is not None:
            return self.enough_at + wait_seconds
        if self.short_at is not None:
            return self.short_at + wait_seconds
        return None if self.refused_at is None else self.refused_at + self.refused_waits * wait_seconds

    def members(self, ratio: float, contributions_min: int = 1) -> tuple[Member, ...]:
        """Return the members of the receipt: nobody, if fewer than the least number count."""
        if len(self.counted) < contributions_min:
            return ()
        entries = {peer_id: self.found[peer_id] for peer_id in self.counted}
        norms = {
            peer_id: float(fp32_from_bits(entry.contribution.norm_bits)) for peer_id, (_, entry) in entries.items()
        }
        assert all(math.isfinite(norm) for norm in norms.values())
        scales = choose_scales(norms, ratio)
        return tuple(Member(peer_id, digest, scales[peer_id]) for peer_id, (digest, _) in entries.items())

    def rejected(self) -> tuple[Rejection, ...]:
        """Return the rejections of the receipt."""
        refused = sorted(peer_id for peer_id, reason in self.reasons.items() if reason)[:REJECTIONS_MAX]
        return tuple(Rejection(peer_id, self.found[peer_id][0], self.reasons[peer_id]) for peer_id in refused)
