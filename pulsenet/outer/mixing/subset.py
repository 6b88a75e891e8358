"""Which tensors Mix2 mixes in the subset variant: a first choice by name, then by what was seen to disagree.

A subset is part of a roster, so that all members mix the same tensors; here is only how a coordinator chooses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.params import ParameterTable

_ENDS: Final = ("embed", "wte", "wpe", "lm_head", "output_projection")
"""Parts of names that token embeddings and heads have."""
_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")

SCORE_DECAY: Final = 0.75
"""Of what was seen before, each time a tensor is seen again."""

WIDEN_FACTOR: Final = 1.5
"""By how much a subset grows, and shrinks again, at one measurement."""

CALM_RATIO: Final = 0.5
"""Below this share of the distance that widens a subset, a wider one shrinks: in between it stays."""


def order_by_name(table: ParameterTable) -> list[int]:
    """Return all tensors: embeddings and head, then layers ascending, then what has neither."""

    def rank(index: int) -> tuple[int, int, int]:
        name = table.tensors[index].name
        if any(part in name for part in _ENDS):
            return 0, 0, index
        number = _NUMBER.search(name)
        return (1, int(number[1]), index) if number else (2, 0, index)

    return sorted(range(len(table.tensors)), key=rank)


def choose_default_subset(table: ParameterTable, ratio: float) -> tuple[int, ...]:
    """Return the subset of a run that has measured nothing yet, ascending.

    Args:
        table: FP32 masters.
        ratio: Share of the elements; what comes next is taken while that brings the share closer to it.

    Raises:
        LocalProtocolError: a ratio outside 0 to 1.
    """
    return _take(table, order_by_name(table), ratio, ())


def update_score(score: float | None, seen: float) -> float:
    """Return a tensor's score after it was seen once more; ``None`` for one never seen."""
    return seen if score is None else SCORE_DECAY * score + (1.0 - SCORE_DECAY) * seen


def merge_scores(
    scores: Mapping[int, float], subset: Sequence[int], seen: Sequence[Sequence[float]]
) -> dict[int, float]:
    """Return the scores after several members told what they saw: their upper median, which a few that lie hardly move.

    Args:
        scores: By tensor, of before.
        subset: Tensors that were seen, ascending.
        seen: Of each member, one value for each of them.
    """
    merged = dict(scores)
    for place, index in enumerate(subset if seen else ()):
        told = sorted(each[place] for each in seen)
        merged[index] = update_score(merged.get(index), told[len(told) // 2])
    return merged


def rank_tensors(table: ParameterTable, scores: Mapping[int, float]) -> list[int]:
    """Return all tensors: those seen in Mix2 by falling score, then the others as by name."""
    seen = sorted(scores, key=lambda index: (-scores[index], index))
    return [*seen, *(index for index in order_by_name(table) if index not in scores)]


def choose_subset(table: ParameterTable, scores: Mapping[int, float], ratio: float) -> tuple[int, ...]:
    """Return the tensors that disagree most, ascending.

    Args:
        table: FP32 masters.
        scores: By tensor, of those seen in Mix2.
        ratio: As :func:`choose_default_subset`.

    Raises:
        LocalProtocolError: a ratio outside 0 to 1.
    """
    return _take(table, rank_tensors(table, scores), ratio, ())


def widen_subset(
    table: ParameterTable, subset: Sequence[int], scores: Mapping[int, float], ratio: float
) -> tuple[int, ...]:
    """Return the subset with more tensors, at least one unless it has all: never fewer.

    Those outside were not seen in Mix2, so what comes next by name joins, until the share is closest to ``ratio``.

    Args:
        table: FP32 masters.
        subset: Of the roster before.
        scores: By tensor, of those that were seen.
        ratio: Share of the elements that the wider subset shall have.

    Raises:
        LocalProtocolError: a ratio outside 0 to 1.
    """
    held = set(subset)
    waiting = [index for index in rank_tensors(table, scores) if index not in held]
    wider = _take(table, waiting, ratio, tuple(subset))
    return wider if len(wider) > len(held) or not waiting else tuple(sorted({*held, waiting[0]}))


def measure_share(table: ParameterTable, subset: Sequence[int]) -> float:
    """Return the share of the elements that some tensors have; an empty subset is all of them."""
    if not subset or not table.element_count:
        return 1.0
    return sum(table.tensors[index].element_count for index in subset) / table.element_count


def adapt_subset(
    table: ParameterTable,
    subset: Sequence[int],
    scores: Mapping[int, float],
    *,
    distance: float,
    distance_max: float,
    ratio: float,
) -> tuple[int, ...]:
    """Return the subset of the next roster, from how far apart trainers are: wider, narrower or the same.

    It grows where their distance is above the run's limit. Once that is well below again, it shrinks towards the run's
    first share, to the tensors that disagreed most: what was taken in for trial stays if it deserves it.

    Args:
        table: FP32 masters.
        subset: Of the roster that was measured by.
        scores: By tensor, of those seen in Mix2.
        distance: Jensen-Shannon distance.
        distance_max: Of the run; 0 changes nothing.
        ratio: Share of a run's first subset.

    Raises:
        LocalProtocolError: a ratio outside 0 to 1.
    """
    current = tuple(subset)
    if distance_max == 0.0 or not current:
        return current
    share = measure_share(table, current)
    if distance > distance_max:
        return widen_subset(table, current, scores, min(1.0, WIDEN_FACTOR * share))
    if distance < CALM_RATIO * distance_max and share > ratio:
        narrower = choose_subset(table, scores, max(ratio, share / WIDEN_FACTOR))
        return narrower if measure_share(table, narrower) < share else current
    return current


def _take(table: ParameterTable, order: Sequence[int], ratio: float, held: Sequence[int]) -> tuple[int, ...]:
    if not 0.0 < ratio <= 1.0:
        raise LocalProtocolError(f"a subset of {ratio} of the elements")
    target = ratio * table.element_count
    chosen = list(held)
    count = sum(table.tensors[index].element_count for index in chosen)
    for index in order:
        more = count + table.tensors[index].element_count
        if chosen and abs(more - target) > abs(count - target):
            break
        chosen.append(index)
        count = more
    return tuple(sorted(chosen))
