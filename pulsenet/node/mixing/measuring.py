"""A coordinator's part in probes: collect what members predict, have it compared, and let the subset follow.

Answers are collected for two rounds at most, beside one that is being compared, and compared once each (SPEC section
6.16). What a probe comes to is a signed fact of the next rosters; nothing waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pulsenet.chain.records import Probe
from pulsenet.chain.rosters import KnownRoster, Rosters
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, Log, Report
from pulsenet.node.mixing.effects import CompareProbes
from pulsenet.node.mixing.events import ProbesCompared
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.pairing import choose_probers
from pulsenet.outer.mixing.probe import Answer, read_answer
from pulsenet.outer.mixing.settings import MixingKind, MixingSettings
from pulsenet.outer.mixing.subset import adapt_subset, choose_default_subset, measure_share, merge_scores
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.schema import decode_value

COLLECT_SECONDS: Final = 60.0
"""How long after the first answer of a round the others are waited for."""

ROUNDS_COLLECTED_MAX: Final = 2
EARLY_ROUNDS_MAX: Final = 2
"""How far above the round that most trainers are in an answer may be of."""


@dataclass(slots=True)
class _Collection:
    """Answers of one round."""

    known: KnownRoster
    first_at: float
    due: frozenset[PeerId]
    answers: dict[PeerId, tuple[Digest, Probe]] = field(default_factory=dict)
    order: CompareProbes | None = None
    is_over: bool = False
    """Whether nothing is waited for any more: later rounds take its place."""


class Measuring:
    """What a convener knows of how far apart trainers are.

    Args:
        trust: The run's rules.
        rosters: Shared by the node's machines; told what was measured.
        settings: Of the run.
        is_leading: Whether this node is the coordinator now.
    """

    def __init__(
        self, trust: Trust, rosters: Rosters, settings: MixingSettings, is_leading: Callable[[float], bool]
    ) -> None:
        self._trust = trust
        self._rosters = rosters
        self._settings = settings
        self._is_leading = is_leading
        self._collections: dict[int, _Collection] = {}
        self._done_round = -1
        self._number = 0
        self._scores: dict[int, float] = {}
        self._decided: tuple[int, ...] | None = None
        self.table: ParameterTable | None = None
        """The masters, once a training process told them."""

    @property
    def kept_count(self) -> int:
        """Answers that are kept."""
        return sum(len(each.answers) for each in self._collections.values())

    def begin_term(self) -> None:
        """Another one may have coordinated meanwhile: what was decided before it is in its rosters, or over."""
        self._decided = None
        self._collections = {}

    # The subset

    def find_subset(self) -> tuple[int, ...] | None:
        """Return the tensors of Mix2 for the next roster; ``None`` while nothing is known to choose from."""
        if not self._settings.variant.mixes_subset:
            return ()
        newest = self._rosters.newest
        for subset in (self._decided, None if newest is None else newest.roster.subset):
            if subset and self._fits(subset):
                return subset
        if self.table is None:
            return None
        return choose_default_subset(self.table, self._settings.subset_ratio)

    def _fits(self, subset: tuple[int, ...]) -> bool:
        return self.table is None or subset[-1] < len(self.table.tensors)

    # Answers

    def take(self, record: bytes, front: int, now: float) -> str:
        """Judge an answer, keep it if it counts, and return the code for its sender.

        Args:
            record: Encoded and signed.
            front: The round that most trainers are in.
            now: Monotonic time.

        Raises:
            TrustError: a code of ``Trust.accept_probe``.
            RemoteProtocolError: ``decode``, ``schema``, ``probe-header`` or ``probe-values``.
        """
        signed = decode_signed(record)
        peek = decode_value(Probe, signed.payload)
        known = self._rosters.get(peek.roster)
        if known is None or self._rosters.find(peek.round_index) != known:
            return "roster"
        probe = self._trust.accept_probe(signed, known.roster, known.digest)
        interval, round_index = self._settings.probe_interval, probe.round_index
        due = choose_probers(known.digest, round_index, known.members)
        is_due = bool(interval) and round_index % interval == 0 and probe.peer_id in due
        if not is_due or not self._is_leading(now):
            return "unexpected"
        if round_index > front + EARLY_ROUNDS_MAX:
            return "early"
        held = self._collections.get(round_index)
        if round_index <= self._done_round or (held is not None and held.order is not None):
            return "round"
        digest = record_digest(signed)
        if held is not None and probe.peer_id in held.answers:
            return "" if held.answers[probe.peer_id][0] == digest else "duplicate"
        read_answer(probe.answer, round_index)
        if held is None:
            if not self._make_room(round_index):
                return "round"
            held = self._collections[round_index] = _Collection(known, now, self._find_awaited(due))
        held.answers[probe.peer_id] = (digest, probe)
        return ""

    def _make_room(self, round_index: int) -> bool:
        """End the collection of the oldest round where another one would be too many; ``False`` if it is older yet."""
        waiting = [index for index, each in self._collections.items() if each.order is None and not each.is_over]
        if len(waiting) < ROUNDS_COLLECTED_MAX:
            return True
        oldest = min(waiting)
        if round_index < oldest:
            return False
        if len(waiting) < len(self._collections):
            del self._collections[oldest]  # another one is being compared still
        else:
            self._collections[oldest].is_over = True
        return True

    def _find_awaited(self, due: tuple[PeerId, ...]) -> frozenset[PeerId]:
        """Return who will answer if all goes well: the odd one out of pairs gets no mean to answer from."""
        is_paired = self._settings.variant.mix1 is MixingKind.PAIR
        return frozenset(due[: len(due) // 2 * 2] if is_paired else due)

    def update(self, now: float) -> list[Effect]:
        """Have the rounds compared whose answers are all there, or whose time is over."""
        effects: list[Effect] = []
        for round_index, held in sorted(self._collections.items()):
            is_whole = held.due <= held.answers.keys()
            is_over = is_whole or held.is_over or now >= held.first_at + COLLECT_SECONDS
            if held.order is not None or not is_over:
                continue
            self._number += 1
            told = [held.answers[key][1] for key in sorted(held.answers)]
            answers = tuple(Answer(probe.batch, probe.bins, probe.answer) for probe in told)
            held.order = CompareProbes(self._number, round_index, answers)
            effects.append(held.order)
        return effects

    def next_wake(self) -> float | None:
        """Return when a round's time is over."""
        times = [held.first_at + COLLECT_SECONDS for held in self._collections.values() if held.order is None]
        return min(times, default=None)

    def take_comparison(self, event: ProbesCompared) -> list[Effect]:
        """Take in what a round's answers came to; the subset may follow."""
        found = [
            (index, held)
            for index, held in self._collections.items()
            if held.order is not None and held.order.number == event.number
        ]
        if not found:
            return []
        ((round_index, held),) = found
        self._done_round = max(self._done_round, round_index)
        self._collections = {index: each for index, each in self._collections.items() if index > self._done_round}
        self._merge_scores(held)
        if event.distance is None:
            return [Count("probes", "alone")]
        self._rosters.note_measured(round_index, fp32_to_bits(min(event.distance, 1.0)))
        effects: list[Effect] = [
            Count("probes", "compared"),
            Report((("disagreement", event.distance), ("disagreement_round", round_index))),
        ]
        return effects + self._decide(held.known.roster.subset, event.distance)

    def _merge_scores(self, held: _Collection) -> None:
        subset = held.known.roster.subset
        told = [probe.scores for _, probe in held.answers.values() if subset and probe.scores]
        seen = [[value for (value,) in struct.iter_unpack("<f", scores)] for scores in told]
        self._scores = merge_scores(self._scores, subset, seen)

    def _decide(self, measured: tuple[int, ...], distance: float) -> list[Effect]:
        settings, table = self._settings, self.table
        # A distance measured while another subset was mixed says nothing of this one.
        if not settings.variant.mixes_subset or table is None or measured != self.find_subset():
            return []
        subset = adapt_subset(
            table,
            measured,
            self._scores,
            distance=distance,
            distance_max=settings.disagreement_max,
            ratio=settings.subset_ratio,
        )
        if subset == measured:
            return []
        self._decided = subset
        before, after = measure_share(table, measured), measure_share(table, subset)
        text = (
            f"trainers are {distance:.3f} apart: Mix2 takes {after:.0%} of the elements from now on, not {before:.0%}"
        )
        return [Count("subsets", "widened" if after > before else "narrowed"), Log("info", text)]
