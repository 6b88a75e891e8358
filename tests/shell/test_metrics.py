"""Series are named once, in base units, with labels from closed sets (A-OBS-1, A-OBS-3)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from pulsenet.chain.ballot import Ballot, Place, Stored, find_vote_refusal
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Fate
from pulsenet.outer.checks import FaultCode
from pulsenetd.metrics import FATES, KINDS, REASONS, VOTES, WASTES, Metrics
from pulsenetd.network import streams
from pulsenetd.storage.store import Store

ROOT = Path(__file__).resolve().parents[2]

CANDIDATE = PeerId(b"c" * 32)
STORED = Stored(Place(3, 1), Digest(bytes(32)), Digest(bytes(32)))
BALLOTS = (
    (Ballot(), 1),
    (Ballot(term=2), 1),
    (Ballot(term=1, voted_for=PeerId(b"o" * 32)), 1),
    (Ballot(term=1, newest=STORED), 2),
)
"""A ballot and the term a candidate without any receipt asks it for: one for each answer."""

LOCAL_CODES = {"message-unexpected", "no-mixing", "no-rounds", "not-listed", "not-trainer", "self-test"}
"""Said to a process of this machine at its socket, and to nobody else."""

CODE_PLACES = {
    # call: index of the argument that is a stable code
    "RemoteProtocolError": 0,
    "TrustError": 0,
    "PeerUnavailableError": 0,
    "PublishFailedError": 0,
    "Refusal": 0,
    "Count": 1,
    "StorageError": 1,
    "RefuseSnapshot": 1,
}


REASONED = ("rejected", "retries", "wasted_bytes")
"""Counters whose labels are reasons."""


def read_spec_codes() -> set[str]:
    """Return the codes of SPEC section 9, and of the refusals in the codec's specification."""
    table = (ROOT / "proto" / "SPEC.md").read_text().split("## 9. Error codes")[1].split("## 10")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    codec = (ROOT / "proto" / "spec-codec.md").read_text()
    return {
        *(code for row in rows for code in re.findall(r"`([a-z-]+)`", row)),
        *re.findall(r"`((?:patch|table|anchor|changes|codec)-[a-z]+(?:-[a-z]+)?)`", codec),
    }


def read_code_literals() -> set[str]:
    """Return every stable code that a module peers can reach writes down."""
    places = [*(ROOT / "pulsenet" / part for part in ("tensors", "codec", "wire", "chain", "node"))]
    files = [path for place in places for path in place.glob("*.py")]
    files += [
        path for path in (ROOT / "daemon" / "pulsenetd").rglob("*.py") if path.parts[-2:] != ("local", "server.py")
    ]
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            index = CODE_PLACES.get(node.func.id)
            if index is None or len(node.args) <= index:
                continue
            first = node.args[0]
            if node.func.id == "Count" and isinstance(first, ast.Constant) and first.value not in REASONED:
                continue  # a fate or an outcome; these counters have labels of their own
            argument = node.args[index]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.add(argument.value)
    return found


def test_every_code_of_the_specification_has_a_series() -> None:
    codes = read_spec_codes()
    assert {"framing", "rollouts-shape", "too-many-streams", "patch-varint", "table-not-canonical"} <= codes
    assert codes - REASONS == set()


def test_every_code_the_modules_write_down_has_a_series() -> None:
    # A local process that hands over wrongly is refused at its socket and not counted.
    codes = {code for code in read_code_literals() if not code.startswith("handoff-")} - LOCAL_CODES
    assert {"fork", "bad-chunk", "no_baseline", "enospc", "unreachable"} <= codes
    assert codes - REASONS == set()


def test_every_reason_that_is_no_literal_has_a_series() -> None:
    """Reasons the machines choose from the documented sets of their effects and events."""
    hops = {"base_mismatch", "root_mismatch", "decode", "structure", "enospc"}
    publishes = {"not_publisher", "table", "superseded", "authorities", "encode"}
    disk = {"enospc", "readonly", "memory", "damaged", "locked", "io"}
    assert (hops | publishes | disk) - REASONS == set()


def test_kinds_are_those_the_streams_count() -> None:
    assert {*streams.KINDS.values(), "other"} == KINDS


def test_traffic_of_the_streams_is_carried_over_once() -> None:
    metrics, traffic = Metrics(), streams.Traffic()
    traffic.bytes["received", "chunk"] += 100
    traffic.rejected["framing"] += 1
    traffic.blob_bytes["sent", "patch"] += 7
    traffic.blob_bytes["sent", "no kind of ours"] += 5
    metrics.take_traffic(traffic)
    metrics.take_traffic(traffic)
    traffic.bytes["received", "chunk"] += 11
    traffic.rejected["invented by a peer"] += 2
    metrics.take_traffic(traffic)
    text = metrics.text().decode()
    assert 'pulsenet_bytes_total{direction="received",kind="chunk"} 111.0' in text
    assert 'pulsenet_blob_bytes_total{direction="sent",kind="patch"} 7.0' in text
    assert 'pulsenet_blob_bytes_total{direction="sent",kind="other"} 5.0' in text
    assert 'pulsenet_rejected_total{reason="framing"} 1.0' in text
    assert 'pulsenet_rejected_total{reason="other"} 2.0' in text


def test_what_the_store_holds_is_shown_beside_what_is_left_of_the_disk(tmp_path: Path) -> None:
    metrics, store = Metrics(), Store.open(tmp_path)
    with store.writing_blob() as writer:
        writer.feed(b"x" * 1000)
        writer.finish()
    usage = store.usage()
    store.close()
    metrics.take_usage(usage)
    assert usage.chunk_size_bytes == 1000
    assert metrics.registry.get_sample_value("pulsenet_store_bytes") == 1000.0
    assert metrics.registry.get_sample_value("pulsenet_store_damaged_chunks_total") == 0.0
    assert metrics.registry.get_sample_value("pulsenet_disk_free_bytes") == float(usage.free_size_bytes)
    assert usage.free_size_bytes > 0


def test_restarts_of_p2pd_are_carried_over_once_by_reason() -> None:
    metrics, restarts = Metrics(), Counter(died=1, hung=2)
    metrics.take_restarts(restarts)
    restarts["died"] += 1
    metrics.take_restarts(restarts)
    text = metrics.text().decode()
    assert 'pulsenet_p2pd_restarts_total{reason="died"} 2.0' in text
    assert 'pulsenet_p2pd_restarts_total{reason="hung"} 2.0' in text


def test_no_stranger_can_invent_a_series() -> None:
    """A-OBS-1"""
    metrics = Metrics()
    for index in range(1_000):
        metrics.count("rejected", f"peer-{index}")
        metrics.count("bytes_received", f"kind-{index}", 10)
        metrics.count("wasted_bytes", f"reason-{index}")
    text = metrics.text().decode()
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) <= 500
    assert 'pulsenet_rejected_total{reason="other"} 1000.0' in text
    assert 'pulsenet_bytes_total{direction="received",kind="other"} 10000.0' in text


def test_names_follow_the_rules_of_promtool() -> None:
    """A-OBS-1"""
    metrics = Metrics()
    metrics.count("retries", "timeout")
    metrics.observe("fetch", 0.5)
    metrics.set("applied_version", 3)
    for line in metrics.text().decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert re.fullmatch(r"pulsenet_[a-z0-9_]+", name)
            assert name.endswith("_total") == (kind == "counter")
    assert "pulsenet_applied_version 3.0" in metrics.text().decode()


def read_counts() -> dict[str, set[str]]:
    """Return the labels that machines count under, as far as they are written down, by counter."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "pulsenet" / "node").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Count":
                name, label = (
                    argument.value if isinstance(argument, ast.Constant) else "" for argument in node.args[:2]
                )
                found.setdefault(str(name), set()).update({str(label)} - {""})
    return found


def test_every_counter_the_machines_name_exists() -> None:
    metrics = Metrics()
    counts = read_counts()
    assert {"rejected", "contributions", "wasted_inner_steps", "votes"} <= set(counts)
    for name in counts:
        metrics.count(name, "other")


def test_what_becomes_of_contributions_steps_and_votes_has_labels() -> None:
    """Fates and refusals are chosen from the sets of their types; each is counted under its own name."""
    assert set(Fate) <= FATES
    assert set(FaultCode) <= FATES
    assert {Fate.REJECTED, Fate.DROPPED, Fate.MISSED, "diverged", "outdated"} == WASTES
    standing = {find_vote_refusal(ballot, term=term, candidate=CANDIDATE, newest=None) for ballot, term in BALLOTS}
    assert standing == {"", "term", "voted", "stale"}
    assert (standing | {"lease", "stood"}) - {""} == VOTES
    assert set(FaultCode) <= REASONS


def test_no_peer_invents_a_fate() -> None:
    """A-OBS-1"""
    metrics = Metrics()
    for name in ("contributions", "wasted_inner_steps", "votes"):
        metrics.count(name, "invented", 2.0)
        series = {"contributions": "fate", "wasted_inner_steps": "reason", "votes": "outcome"}[name]
        assert metrics.registry.get_sample_value(f"pulsenet_{name}_total", {series: "other"}) == 2.0
    metrics.count("contributions", Fate.COUNTED)
    assert metrics.registry.get_sample_value("pulsenet_contributions_total", {"fate": "counted"}) == 1.0


def test_counters_of_two_labels_and_of_none_are_counted_by_name() -> None:
    metrics = Metrics()
    metrics.count("mixes", "mix1-mixed")
    metrics.count("mixes", "mix1-other-thing")
    metrics.count("mixes", "mix1")
    metrics.count("mixing_slices", "other-base", 2.0)
    metrics.count("rosters", "ignored")
    value = metrics.registry.get_sample_value
    assert value("pulsenet_mixes_total", {"mix": "mix1", "outcome": "mixed"}) == 1.0
    assert value("pulsenet_mixes_total", {"mix": "mix1", "outcome": "other"}) == 2.0
    assert value("pulsenet_mixing_slices_total", {"outcome": "other-base"}) == 2.0
    assert value("pulsenet_rosters_total") == 1.0


def test_a_counter_nobody_declared_is_our_own_error() -> None:
    with pytest.raises(KeyError):
        Metrics().count("surprise", "x")
