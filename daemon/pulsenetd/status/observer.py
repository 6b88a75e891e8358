"""Looks at a node every few seconds and remembers what a single answer cannot say: rates, rounds, the last hours."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pulsenet.ids import PeerId
from pulsenet.node.mesh import Mesh
from pulsenetd.network.transport import PeerLink
from pulsenetd.status.history import History
from pulsenetd.status.peers import DIRECTIONS, PeerMeter, list_peers

ROUNDS_MAX: Final = 20


class RoundLog:
    """The last rounds, as far as looks saw them: a round that began and ended between two looks is not in it."""

    def __init__(self) -> None:
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS_MAX)

    def look(self, now_ms: int, fields: Mapping[str, Any]) -> None:
        """Take in where the node is: of rounds with receipts, or of mixing ones."""
        if fields.get("mixing_phase") is not None:
            self._note(
                now_ms,
                int(fields.get("mixing_round") or 0),
                "mixing",
                contributors=fields.get("mixing_members"),
                mix1=fields.get("mixing_mix1"),
                mix2=fields.get("mixing_mix2"),
            )
        elif fields.get("round_index") is not None and int(fields["round_index"]) > 0:
            # The index names the round that is due; the contributors are those of the one before.
            self._note(now_ms, int(fields["round_index"]) - 1, "receipt", contributors=fields.get("round_contributors"))

    def newest_first(self) -> list[dict[str, Any]]:
        """Return the rounds remembered."""
        return [dict(one) for one in reversed(list(self._rounds))]

    def _note(self, now_ms: int, index: int, kind: str, **facts: Any) -> None:
        newest = self._rounds[-1] if self._rounds else None
        if newest is not None and newest["round"] == index and newest["kind"] == kind:
            newest.update(facts)
            return
        is_next = newest is not None and newest["kind"] == kind and newest["round"] == index - 1
        seconds = (now_ms - newest["time_ms"]) / 1000 if newest is not None and is_next else None
        self._rounds.append({"round": index, "kind": kind, "time_ms": now_ms, "seconds": seconds, **facts})


class Observer:
    """What the last looks found. Whoever owns the timer looks; may be read from any thread."""

    def __init__(self) -> None:
        self.history = History()
        self._peers: list[dict[str, Any]] = []
        self._peer_meter = PeerMeter()
        self._rounds = RoundLog()
        self._before: tuple[float, dict[str, int]] | None = None
        self._rates: dict[str, float] = {}

    def look(self, now: float, now_ms: int, fields: Mapping[str, Any], counted: Mapping[tuple[str, str], int]) -> None:
        """Take one sample.

        Args:
            now: Monotonic seconds.
            now_ms: Unix time in milliseconds.
            fields: What the machines reported.
            counted: Bytes by direction and kind since the start.
        """
        totals = {
            name: sum(size for (direction, _), size in counted.items() if direction == name) for name in DIRECTIONS
        }
        if self._before is not None and now > self._before[0]:
            at, before = self._before
            self._rates = {
                f"{name}_bytes_per_second": (totals[name] - before[name]) / (now - at) for name in DIRECTIONS
            }
        self._before = (now, totals)
        self._rounds.look(now_ms, fields)
        self.history.add(now_ms, {**fields, **self._rates})

    def look_at_peers(
        self, now: float, links: Sequence[PeerLink], mesh: Mesh, counted: Mapping[PeerId, Mapping[str, int]]
    ) -> None:
        """Describe the peers anew; arguments as of :func:`pulsenetd.status.peers.list_peers`."""
        self._peers = list_peers(links, mesh, counted, self._peer_meter.measure(now, counted))

    def status(self) -> dict[str, Any]:
        """Return what ``/status`` shows of the looks."""
        return {
            **{f"{name}_bytes_per_second": self._rates.get(f"{name}_bytes_per_second") for name in DIRECTIONS},
            "peer_list": list(self._peers),
            "rounds_recent": self._rounds.newest_first(),
        }
