"""Mutated bytes against every decoder, counted: ``python tests/fuzz/campaign.py --count 1000000 --seed 1``.

Whatever a decoder raises beside what it promises, or takes although it must not, is a failure. It is printed as the
name of the target and the bytes in hexadecimal; a file of these in ``corpus/<target>/`` is tried again at every run.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import codec_targets
import local_targets
import wire_targets
from mutate import mutate
from targets import Target

from pulsenet.errors import RemoteProtocolError, TrustError

CORPUS = Path(__file__).parent / "corpus"
PROTO = Path(__file__).parents[2] / "proto"
ROUND_COUNT = 50
"""Inputs of one target before the next has its turn, so that a run that ends early has seen all of them."""

ROUND_SIZE_BYTES = 8 << 20
GROWTH_SIZE_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Failure:
    """Something a decoder must not do."""

    target: str
    data: bytes
    error: str


@dataclass
class Outcome:
    """What a campaign found."""

    tried: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    slowest: tuple[float, str, int] = (0.0, "", 0)
    growth: tuple[int, str] = (0, "")
    """The most bytes that memory grew by while one target's inputs were decoded, and which target it was."""
    kept_size_bytes: int = 0
    """What was not given back in the end."""

    @property
    def is_bounded(self) -> bool:
        return max(self.growth[0], self.kept_size_bytes) < GROWTH_SIZE_BYTES_MAX


def make_targets() -> list[Target]:
    return [*wire_targets.make_targets(), *codec_targets.make_targets(), *local_targets.make_targets()]


def read_spec_codes() -> frozenset[str]:
    """Every code the specification names."""
    text = "".join(path.read_text() for path in sorted(PROTO.glob("*.md")))
    return frozenset(re.findall(r"`([a-z][a-z0-9-]*)`", text))


def try_one(target: Target, data: bytes, codes: frozenset[str]) -> tuple[bool, str]:
    """Return whether the bytes were accepted, and what went wrong, if anything did."""
    try:
        target.decode(data)
    except target.errors as error:
        if target.has_spec_codes and isinstance(error, RemoteProtocolError | TrustError) and error.code not in codes:
            return False, f"the specification knows no code {error.code!r}"
        return False, ""
    except Exception as error:  # any other is what this looks for
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def run(targets: list[Target], count: int, seed: int, seconds_max: float = float("inf")) -> Outcome:
    """Try so many mutated inputs, shared out evenly."""
    outcome, codes = Outcome(), read_spec_codes()
    for target in targets:  # what is loaded and compiled at first use is no growth
        for data in target.seeds:
            try_one(target, data, codes)
    gc.collect()
    before = _read_memory("VmRSS")
    draws = {target.name: random.Random(f"{seed} {target.name}") for target in targets}
    give_up_at = time.monotonic() + seconds_max
    while outcome.tried < count and time.monotonic() < give_up_at:
        for target in targets:
            _run_round(target, _draw_inputs(target, draws[target.name], count - outcome.tried), codes, outcome)
    gc.collect()
    outcome.kept_size_bytes = _read_memory("VmRSS") - before
    return outcome


def _draw_inputs(target: Target, draw: random.Random, count_max: int) -> list[bytes]:
    """Mutate first, so that what this takes is not held against the decoder."""
    inputs: list[bytes] = []
    while len(inputs) < min(ROUND_COUNT, count_max) and sum(map(len, inputs)) < ROUND_SIZE_BYTES:
        inputs.append(mutate(draw, target.seeds, is_structured=target.is_structured))
    return inputs


def _run_round(target: Target, inputs: list[bytes], codes: frozenset[str], outcome: Outcome) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest memory so far
    before = _read_memory("VmHWM")
    for data in inputs:
        begun = time.perf_counter()
        is_accepted, error = try_one(target, data, codes)
        outcome.slowest = max(outcome.slowest, (time.perf_counter() - begun, target.name, len(data)))
        outcome.tried += 1
        (outcome.accepted if is_accepted else outcome.refused)[target.name] += 1
        if error:
            outcome.failures.append(Failure(target.name, data, error))
    outcome.growth = max(outcome.growth, (_read_memory("VmHWM") - before, target.name))


def _read_memory(field: str) -> int:
    """Return a figure of this process in bytes: ``VmRSS`` for now, ``VmHWM`` for the most since it was forgotten."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description="Throw mutated bytes at every decoder.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="", help="a part of the targets' names")
    parser.add_argument("--verbose", action="store_true", help="print every target's counts")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    targets = [target for target in make_targets() if arguments.only in target.name]
    begun = time.monotonic()
    outcome = run(targets, arguments.count, arguments.seed, arguments.seconds)
    for name in sorted(target.name for target in targets) if arguments.verbose else ():
        print(f"{name:40} {outcome.accepted[name]:8} accepted {outcome.refused[name]:8} refused")
    seen: Counter[str] = Counter()
    for failure in outcome.failures:
        seen[failure.target] += 1
        if seen[failure.target] <= 3:
            print(f"{failure.target}: {failure.error[:300]}\n  {failure.data[:2000].hex()}")
    accepted = outcome.accepted.total()
    print(
        f"{outcome.tried} inputs to {len(targets)} decoders in {time.monotonic() - begun:.0f} s: {accepted} accepted, "
        f"{len(outcome.failures)} failures, growth {outcome.growth[0] / (1 << 20):.1f} MiB ({outcome.growth[1]}), "
        f"kept {outcome.kept_size_bytes / (1 << 20):.1f} MiB, "
        f"slowest {outcome.slowest[0] * 1000:.0f} ms ({outcome.slowest[1]})"
    )
    return int(bool(outcome.failures) or not outcome.is_bounded)


if __name__ == "__main__":
    raise SystemExit(main())
