"""The only module that names Prometheus series.

Labels come from closed sets, never from peers: no peer id, digest or version is ever a label value.
A reason no table knows is counted as ``other``, so a stranger cannot invent series.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from pulsenet.node.effects import Fate
from pulsenetd.network import streams
from pulsenetd.network.streams import Traffic
from pulsenetd.storage.store import Usage

# fmt: off
REASONS: Final = frozenset(
    {
        # wire, records and trust (SPEC section 9)
        "framing", "message-unknown", "unexpected-message", "decode", "schema", "chunk-list", "rollouts-shape",
        "rollouts-value", "rollouts-metadata", "token", "wrong-type", "wrong-run", "signature", "untrusted", "rollback",
        "expired", "future", "fork", "epoch", "revision-unknown", "revision-gap", "term", "table", "mismatch",
        "wire-version", "not-admitted", "not-found", "range", "unexpected", "busy", "starting", "storage",
        "unavailable", "too-many-streams", "struck-out", "peer-id", "bad-chunk", "duplicate", "rate", "queue",
        "replay", "staleness", "early", "roster", "probe-header", "probe-values",
        # tables, patches and anchors (spec-codec)
        "table-too-large", "table-decode", "table-invalid", "table-not-canonical", "patch-varint", "patch-truncated",
        "patch-magic", "patch-version", "patch-form", "patch-table", "patch-block", "patch-size", "patch-count",
        "patch-trailing", "patch-plane", "patch-gaps", "patch-values", "patch-mismatch", "codec-unknown",
        "codec-unsuitable", "changes-header", "changes-truncated", "changes-index", "anchor-header",
        "anchor-truncated", "anchor-trailing",
        # rounds (SPEC section 9)
        "base", "conflict", "finite", "lease", "norm", "round", "shape", "stale", "stood", "voted",
        "contribution-base", "contribution-header", "contribution-table", "slice-header", "scale", "members",
        "state-header", "state-truncated", "state-trailing", "state-slots",
        # requests
        "timeout", "closed", "refused", "unreachable", "hedge", "thin-upload",
        # hops and engines
        "base_mismatch", "root_mismatch", "structure", "engine", "read_back", "too-large",
        # publishing
        "not_publisher", "superseded", "authorities", "behind", "diverged", "no_snapshot", "no_baseline", "no_base",
        "encode", "cut_short", "dropped", "too_slow", "other_base", "bad_changes",
        # the disk
        "enospc", "readonly", "memory", "damaged", "locked", "io",
    }
)
"""Every reason anything is refused, wasted or tried again for."""
FATES: Final = frozenset({*Fate, "finite", "norm", "shape", "base", "round", "decode", "enospc", "memory", "io"})
"""What became of the own contributions: a receipt's fate, or why there was nothing to send."""
WASTES: Final = frozenset({Fate.REJECTED, Fate.DROPPED, Fate.MISSED, "diverged", "outdated"})
"""Why inner steps were for nothing."""
VOTES: Final = frozenset({"stood", "term", "voted", "stale", "lease"})
"""Candidacies of this authority, and why it refused its vote to others."""
ROLLOUTS: Final = frozenset(
    {"taken", "duplicate", "stale", "refused", "queued", "busy", "malformed", "sent", "lost"}
)
"""What became of rollout batches, at a trainer and at an inferencer."""
CHECKS: Final = frozenset({"matched", "mismatched"})
"""Samples whose logprobs the training process recomputed."""
TASKS: Final = frozenset({"queued", "leased", "done", "given_up"})
"""Tasks of the training process: as often as each was leased, and answered once."""
SLICES: Final = frozenset({"summed", "failed", "astray"})
"""Slices that were summed here, sums that failed, and rounds whose slices led to another state than everybody's."""
JOBS: Final = frozenset({"mix1", "mix2"})
MIXES: Final = frozenset({"mixed", "part", "late", "lost", "over", "refused", "store"})
"""What came of a mixing: somebody else's values, or why only the own ones."""
DEBTS: Final = frozenset({"owed", "settled", "void", "forgotten"})
"""Means that only the other side of a pair took: found out, made up for, found to be none, given up."""
MIXING_ROUNDS: Final = frozenset({"listed", "unlisted"})
PROBES: Final = frozenset({"answered", "refused", "compared", "alone"})
"""Answers signed here and refused by the coordinator; as one, rounds compared, and rounds that gave no pair."""
SUBSETS: Final = frozenset({"widened", "narrowed"})
MIXING_SLICES: Final = frozenset({"combined", "taken", "refused", "other-base"})
"""Slices of global means: made here, taken from their owners, found bad, made from another mean than the own."""
KINDS: Final = frozenset({*streams.KINDS.values(), "other"})
"""What bytes on streams are counted as."""
BLOB_KINDS: Final = frozenset({"patch", "skip", "anchor", "contribution", "slice", "state", "other"})
"""What the chunks among them belong to."""
# fmt: on
RESTARTS: Final = frozenset({"died", "hung", "failed", "stuck"})
"""Why p2pd was started anew; ``failed`` counts tries that brought none up."""
DISK_REASONS: Final = ("enospc", "readonly", "memory", "damaged", "locked", "io")
"""Reasons that the disk refuses for."""
STAGES: Final = ("fetch", "decode", "verify", "stage", "pause", "apply", "encode", "commit")
DIRECTIONS: Final = frozenset({"received", "sent"})
OPENAI_ROUTES: Final = frozenset({"completions", "chat", "models"})
OPENAI_STATUSES: Final = frozenset(
    {"200", "400", "401", "403", "404", "405", "408", "411", "413", "414", "415", "422", "429", "500", "501", "502"}
    | {"503", "504"}
)
"""Those of the port's own and vLLM's."""


class Metrics:
    """One node's series, in a registry of their own so that tests can build many."""

    def __init__(self) -> None:
        # A second series for the birth of each counter doubles the text and helps nobody here.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's, without annotations
        self.registry = CollectorRegistry()
        self._taken: dict[tuple[str, ...], int] = {}
        self._gauges = {name: Gauge(f"pulsenet_{name}", text, registry=self.registry) for name, text in _GAUGES.items()}
        self._counters = {
            name: Counter(f"pulsenet_{name}", text, list(labels), registry=self.registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self.peers = Gauge("pulsenet_peers", "Peers by kind.", ["kind"], registry=self.registry)
        self.update_seconds = Histogram(
            "pulsenet_update_seconds",
            "Seconds one stage of an update took.",
            ["stage"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        # A series that appears with its first count shows no increase by it; alerts wait for these.
        for reason in sorted(RESTARTS):
            self._child("p2pd_restarts", reason)
        for reason in DISK_REASONS:
            self._child("rejected", reason)

    def set(self, name: str, value: float) -> None:
        """Set a gauge of :data:`_GAUGES`; the name is ours, so an unknown one is a programming error."""
        self._gauges[name].set(value)

    def count(self, name: str, label: str = "", value: float = 1.0) -> None:
        """Add to a counter, named as a core machine's ``Count`` effect does.

        Args:
            name: Of :data:`COUNTERS`, or ``bytes_`` and a direction.
            label: Value of its label, or two of them joined by ``-``; ignored where it has none.
            value: How much more.
        """
        direction = name.removeprefix("bytes_")
        if direction != name:
            self._child("bytes", direction, label).inc(value)
        elif len(COUNTERS[name][1]) == 2:
            first, _, second = label.partition("-")
            self._child(name, first, second).inc(value)
        else:
            self._child(name, label).inc(value)

    def _child(self, name: str, *labels: str) -> Counter:
        """Return one series of a counter; a label that is not of its closed set is ``other``."""
        allowed = COUNTERS[name][1].values()
        if not allowed:
            return self._counters[name]
        return self._counters[name].labels(*(closed(one, known) for one, known in zip(labels, allowed, strict=True)))

    def observe(self, stage: str, seconds: float) -> None:
        """Record how long one stage of an update took."""
        assert stage in STAGES
        self.update_seconds.labels(stage).observe(seconds)

    def take_traffic(self, traffic: Traffic) -> None:
        """Carry what the streams counted since the last call into the counters."""
        for (direction, kind), total in list(traffic.bytes.items()):
            self._advance("bytes", (direction, kind), total)
        for (direction, kind), total in list(traffic.blob_bytes.items()):
            self._advance("blob_bytes", (direction, kind), total)
        for reason, total in list(traffic.rejected.items()):
            self._advance("rejected", (reason,), total)

    def take_usage(self, usage: Usage) -> None:
        """Show what the store holds, and what is left of the disk."""
        self.set("store_bytes", usage.chunk_size_bytes)
        self._advance("store_damaged_chunks", (), usage.damaged_count)
        self.set("disk_free_bytes", usage.free_size_bytes)

    def take_restarts(self, restarts: Mapping[str, int]) -> None:
        """Carry what the supervisor counted since the last call into the counter."""
        for reason, total in list(restarts.items()):
            self._advance("p2pd_restarts", (reason,), total)

    def _advance(self, name: str, labels: tuple[str, ...], total: int) -> None:
        source = (name, *labels)
        self._child(name, *labels).inc(total - self._taken.get(source, 0))
        self._taken[source] = total

    def text(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


def closed(label: str, allowed: frozenset[str]) -> str:
    """Return ``label`` if it belongs to the closed set, else ``other``."""
    return label if label in allowed else "other"


COUNTERS: Final[Mapping[str, tuple[str, Mapping[str, frozenset[str]]]]] = {
    # name: (what it counts, label: the values it may have)
    "bytes": ("Payload bytes moved between peers.", {"direction": DIRECTIONS, "kind": KINDS}),
    "blob_bytes": ("Bytes of chunks by kind of blob.", {"direction": DIRECTIONS, "kind": BLOB_KINDS}),
    "wasted_bytes": ("Bytes received that helped nobody.", {"reason": REASONS}),
    "rejected": ("Refused inputs.", {"reason": REASONS}),
    "retries": ("Requests sent again.", {"reason": REASONS}),
    "p2pd_restarts": ("Times p2pd was restarted, or failed to.", {"reason": RESTARTS}),
    "store_damaged_chunks": ("Chunks found damaged on disk and dropped.", {}),
    "published_versions": ("Versions committed here.", {}),
    "rollouts": ("Rollout batches by outcome.", {"outcome": ROLLOUTS}),
    "rollout_checks": ("Samples whose logprobs were recomputed.", {"outcome": CHECKS}),
    "tasks": ("Tasks for inferencers by outcome.", {"outcome": TASKS}),
    "contributions": ("Own contributions by fate.", {"fate": FATES}),
    "wasted_inner_steps": ("Inner steps that no round counts.", {"reason": WASTES}),
    "votes": ("Candidacies, and votes refused, of an authority.", {"outcome": VOTES}),
    "slices": ("Slices of rounds: summed here, failed, led astray.", {"outcome": SLICES}),
    "mixes": ("Mixings by kind and outcome.", {"mix": JOBS, "outcome": MIXES}),
    "mixed_parts": ("Parts in the means that were made here.", {"mix": JOBS}),
    "mixing_rounds": ("Rounds opened, by whether a roster listed this node.", {"outcome": MIXING_ROUNDS}),
    "mixing_slices": ("Slices of global means by outcome.", {"outcome": MIXING_SLICES}),
    "debts": ("Means that one side of a pair took alone.", {"outcome": DEBTS}),
    "rosters": ("Rosters signed here.", {}),
    "probes": ("Answers to probes, and what came of them at the coordinator.", {"outcome": PROBES}),
    "subsets": ("Changes of Mix2's subset decided here.", {"outcome": SUBSETS}),
    "openai_requests": ("Requests to the OpenAI port answered.", {"route": OPENAI_ROUTES, "status": OPENAI_STATUSES}),
    "openai_bytes": ("Bytes of bodies at the OpenAI port.", {"direction": DIRECTIONS}),
}

_GAUGES: Final = {
    "applied_version": "Number of the version in use: confirmed by the engine, or committed; -1 before the first.",
    "mirror_version": "Number of the version the mirror holds, its root checked; -1 before the first.",
    "latest_seen_version": "Number of the newest version heard of; -1 before the first.",
    "version_lag": "Latest seen minus applied version; NaN while no publisher was heard.",
    "version_age_seconds": "Seconds since the applied version was published or last confirmed as newest.",
    "publisher_last_seen_timestamp_seconds": "Unix time at which the newest head was signed; 0 before the first.",
    "publisher_seen": "1 while the newest head is within its validity.",
    "stale": "1 when the newest head has outlived its validity.",
    "fork": "1 when two valid manifests of one version disagree.",
    "patch_density_ratio": "Changed share of the newest patch.",
    "patch_compression_ratio": "Dense bytes over patch bytes of the newest patch.",
    "reachable": "1 when a peer dialled back on request, 0 when none could; NaN while nobody was asked.",
    "clock_offset_seconds": "Seconds this clock runs ahead of the median of the peers.",
    "store_bytes": "Bytes of blobs on disk.",
    "disk_free_bytes": "Bytes free where the data directory lies.",
    "round_index": "Rounds that led to the state of this trainer, or known as final on other nodes; -1 before.",
    "round_contributors": "Contributions that the newest round stepped here counts.",
    "rounds_behind": "Final rounds that this trainer did not step yet.",
    "round_stuck": "1 when no round ended for longer than the node's round limit.",
    "disagreement": "Jensen-Shannon distance between trainers at the newest probe; NaN without probes.",
    "disagreement_l2_start": "Euclidean distance between two trainers' outer iterates, as Mix1 told; else NaN.",
    "disagreement_l2_end": "The same of their weights after the inner steps, on the tensors of Mix2.",
    "disagreement_l2_bound": "What theory without outer momentum bounds it by, from what the inner steps did.",
    "mixing_subset_ratio": "Share of the elements that Mix2 takes, by the roster; NaN without Mix2.",
    "consensus": "1 if all members hold what the run publishes, 0 if it is one trainer's own; NaN without gossip.",
    "utilization_ratio": "Share of the last rounds' time spent on inner steps; NaN before two rounds.",
    "utilization_predicted_ratio": "The same as predicted for the link's stated or observed speed; NaN before.",
    "residual_norm": "Euclidean norm of what the gate held back; NaN until the training process tells.",
    "rollout_queue_batches": "Rollout batches waiting: at a trainer for the training process, else to be sent.",
}
