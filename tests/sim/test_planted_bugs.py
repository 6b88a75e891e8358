"""Bugs of one line, planted in the rules, are caught by the checkers; without them the same seeds are all well."""

from __future__ import annotations

import inspect
import sys
import textwrap

import pytest

from pulsenet.node.engine_swap import EngineSwap
from pulsenet.node.fetch import Fetcher
from pulsenet.node.trainer import Trainer
from pulsenet.testing import world
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.disk import FailingStore
from pulsenet.testing.paper import PaperSizes
from pulsenet.testing.spread import PaperWorld
from pulsenet.testing.story import Plan, play

SEEDS = range(20)
NODE_COUNT = 6


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *bugs: tuple[str, str]) -> None:
    """Replace pieces of a method's source by others."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    for line, bug in bugs:
        assert source.count(line) == 1, f"{owner.__name__}.{name} reads otherwise by now: plant the bug anew"
        source = source.replace(line, bug)
    namespace = dict(vars(sys.modules[owner.__module__]))
    exec(f"from __future__ import annotations\n{source}", namespace)  # noqa: S102 - our own source
    monkeypatch.setattr(owner, name, namespace[name])


def find_violation() -> str:
    """Return the first violation that a seed shows; without the bug, that seed shows none."""
    for seed in SEEDS:
        outcome = play(Plan(seed, NODE_COUNT))
        if outcome.violations:
            assert f"simulation seed {seed}" in outcome.violations[0]
            return outcome.violations[0]
    return "none"


def test_without_a_bug_all_is_well() -> None:
    assert play(Plan(SEEDS[0], NODE_COUNT)).is_good


def test_a_chunk_taken_without_a_look_at_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Fetcher, "_take_chunk", (" or compute_digest(reply.data) != reply.digest", ""))
    assert "stored bytes that are not chunk" in find_violation()


def test_a_chunk_served_without_a_look_at_what_the_disk_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FailingStore, "_is_sound", ("compute_digest(self.chunks[digest]) != digest", "False"))
    # Whether the checker looks at the disk or at what leaves it first is chance.
    assert "bytes that are not chunk" in find_violation()


def test_a_publisher_that_forgets_what_it_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Trainer, "_take_committed", ("    self._state = draft.state", "    pass"))
    outcome = play(Plan(SEEDS[0], NODE_COUNT))
    assert not outcome.converged
    assert "commits nothing more" in outcome.shortfall


def test_an_engine_said_to_serve_what_it_was_only_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, EngineSwap, "due", ("self._handed = mirror", "self._handed = self.version = mirror"))
    assert "its engine holds" in find_violation()


def test_a_version_that_falls_while_the_mirror_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = "is_done or (self._goal is not None and mirror >= self._goal)"
    plant(monkeypatch, EngineSwap, "due", ("mirror <= self.version", "mirror == self.version"), (reached, "True"))
    assert "back to" in find_violation()


def fetch_to_a_slow_disk() -> str:
    """Let one node fetch 200 chunks, each of which may take its disk seconds; return the violation, if any."""
    swarm = PaperWorld(1, PaperSizes(patch=200 * 1_000, chunk=1_000))
    swarm.add_node("trainer", "trainer")
    swarm.add_node("reader", "inferencer")
    try:
        for _ in range(2):
            swarm.publish_and_wait()
            swarm.run_until(swarm.is_settled, 200.0)
    except SimulationError as error:
        return str(error)
    return "none"


def test_a_fetcher_that_asks_for_more_than_its_buffers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of the stories have a few chunks: this takes many, and a disk that is slower than the network."""
    monkeypatch.setattr(world, "WORK_SECONDS_MAX", 5.0)
    assert fetch_to_a_slow_disk() == "none"
    plant(monkeypatch, Fetcher, "_ask_chunks", ("CHUNKS_IN_FLIGHT_MAX - self.chunks_in_flight", "CHUNKS_IN_FLIGHT_MAX"))
    assert "chunks in flight" in fetch_to_a_slow_disk()
