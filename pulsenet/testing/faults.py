"""What a simulation may do to a swarm, by name, and how much of it a seed draws."""

from __future__ import annotations

from enum import StrEnum

from pulsenet.errors import UsageError
from pulsenet.testing.fakes import Chance
from pulsenet.testing.network import Faults


class Fault(StrEnum):
    """One kind of trouble."""

    DROP = "drop"
    """Requests and replies that never arrive, and streams that end at once."""
    DUPLICATE = "duplicate"
    """Replies that arrive twice."""
    REORDER = "reorder"
    """Messages that overtake each other."""
    DELAY = "delay"
    """Messages that take seconds."""
    PARTITION = "partition"
    """Groups of nodes between which nothing gets through, the directory on one side."""
    ONE_WAY = "one-way"
    """The same in one direction."""
    CLOG = "clog"
    """Pairs of nodes between which everything is held for a while, and then arrives."""
    CRASH = "crash"
    """Nodes that die, also between two effects of one call, with all that is not on disk; they come back later."""
    TORN = "torn"
    """Writes under way at a crash that are on disk in part."""
    FLIP = "flip"
    """Bits of chunks that flip on the way."""
    ROT = "rot"
    """Bits that flip on followers' disks and in their memory."""
    SKEW = "skew"
    """Wall clocks that are up to two seconds off."""
    LIE = "lie"
    """Providers that send other bytes, or deny what they hold."""
    SILENCE = "silence"
    """Providers that take requests and never answer."""
    ENGINE = "engine"
    """Engines that refuse updates."""


ALL_FAULTS = frozenset(Fault)


def parse_faults(text: str) -> frozenset[Fault]:
    """Return the kinds that ``none``, ``all`` or a list with commas names.

    Raises:
        UsageError: a name is unknown.
    """
    if text == "none":
        return frozenset()
    if text == "all":
        return ALL_FAULTS
    kinds = set()
    for name in text.split(","):
        try:
            kinds.add(Fault(name.strip()))
        except ValueError:
            raise UsageError(f"no fault is called '{name.strip()}'; there are: {', '.join(Fault)}") from None
    return frozenset(kinds)


def format_faults(kinds: frozenset[Fault]) -> str:
    """Return the text that :func:`parse_faults` reads back."""
    if kinds in (frozenset(), ALL_FAULTS):
        return "all" if kinds else "none"
    return ",".join(kind for kind in Fault if kind in kinds)


def draw_rates(chance: Chance, kinds: frozenset[Fault]) -> Faults:
    """Return how often messages suffer what, between seldom and often, for the kinds named."""

    def rate(kind: Fault, most: int) -> int:
        # Drawn for every kind, so that leaving one out changes nothing about the others.
        drawn = chance(most)
        return drawn if kind in kinds else 0

    spread_seconds = chance.between(0.01, 0.5)
    return Faults(
        latency_seconds_min=0.005,
        latency_seconds_max=0.005 + (spread_seconds if Fault.REORDER in kinds else 0.0),
        drop_per_mille=rate(Fault.DROP, 60),
        close_per_mille=rate(Fault.DROP, 60),
        lose_per_mille=rate(Fault.DROP, 30),
        duplicate_per_mille=rate(Fault.DUPLICATE, 80),
        delay_per_mille=rate(Fault.DELAY, 50),
        flip_per_mille=rate(Fault.FLIP, 50),
        engine_fail_per_mille=rate(Fault.ENGINE, 200),
    )
