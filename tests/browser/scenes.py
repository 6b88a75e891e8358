"""Nodes to look at: what their status says, as a running one would say it."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping
from typing import Any

from pulsenet.ids import PeerId
from pulsenetd.identity import to_libp2p_text
from pulsenetd.status.conditions import find_conditions
from pulsenetd.status.history import SAMPLE_SECONDS, SAMPLES_MAX, History
from pulsenetd.status.log_tail import LogTail
from pulsenetd.status.transfers import list_transfers

NOW_MS = 1_790_000_000_000
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&"


class Scene:
    """What the page of one node is made of; changes when a test says so."""

    def __init__(self, fields: Mapping[str, Any], *, samples: int = 0, busy: float = 0.0, seed: int = 7) -> None:
        self.fields = {**BASE, **fields}
        self.history = History()
        self.log_tail = LogTail({"/srv/private/node": "DATA-DIR"})
        _fill(self.history, self.fields, samples, busy, random.Random(seed))

    def status(self) -> dict[str, Any]:
        """Return what a node says, its conditions and transfers found as a node finds them."""
        status = dict(self.fields)
        status["transfers"] = list_transfers(status, status["received_bytes_per_second"])
        status["conditions"] = find_conditions(status)
        return status

    def log(self, level: str, text: str) -> None:
        """Write a line."""
        self.log_tail.handle(
            logging.LogRecord("pulsenet", getattr(logging, level.upper()), __file__, 1, text, None, None)
        )


def peer(number: int, **facts: Any) -> dict[str, Any]:
    """Return an entry of ``peer_list``."""
    text = to_libp2p_text(PeerId(bytes([number * 37 % 251]) * 32))
    nothing = {"received_bytes": 0, "sent_bytes": 0, "received_bytes_per_second": 0.0, "sent_bytes_per_second": 0.0}
    return {
        "peer_id": text,
        "role": "inferencer",
        "version": "0.417",
        "is_connected": True,
        "is_neighbour": number % 2 == 0,
        "is_outbound": number % 3 == 0,
        "round_trip_seconds": 0.004 * number,
        **nothing,
        **facts,
    }


BASE: dict[str, Any] = {
    "run": "math-7b",
    "run_id": "5f" * 32,
    "peer_id": to_libp2p_text(PeerId(bytes([9]) * 32)),
    "pid": 4711,
    "role": "inferencer",
    "software": "pulsenet 0.1.0",
    "now_ms": NOW_MS,
    "uptime_seconds": 93_000.0,
    "event_loop_turns": True,
    "addresses": ["/ip4/203.0.113.7/tcp/4001"],
    "reachability": {"reachable": True, "advice": ""},
    "clock_offset_seconds": 0.02,
    "p2pd_restarts": 0,
    "p2pd_healthy": True,
    "store_bytes": 15_300_000_000,
    "store_damaged_chunks": 0,
    "disk_free_bytes": 210_000_000_000,
    "last_update_failed": False,
    "bytes": {"received_chunk": 48_200_000_000, "received_head": 1_200_000, "sent_chunk": 61_900_000_000},
    "state": "current",
    "reason": "",
    "applied_epoch": 0,
    "applied_version": 417,
    "latest_seen_epoch": 0,
    "latest_seen_version": 417,
    "version_lag": 0,
    "version_age_seconds": 12.0,
    "publisher_seen": True,
    "publisher_last_seen_timestamp_seconds": NOW_MS / 1000 - 12,
    "stale": False,
    "fork": False,
    "peers": 3,
    "peers_neighbour": 2,
    "received_bytes_per_second": 0.0,
    "sent_bytes_per_second": 0.0,
    "peer_list": [peer(1, role="trainer"), peer(2), peer(3, role="seed")],
    "rounds_recent": [],
}


def idle() -> Scene:
    """A node that holds the newest version and was started an hour ago; nothing moves."""
    scene = Scene({"uptime_seconds": 3_700.0}, samples=720)
    scene.log("info", "version 0.417 applied in 0.9 s, root 651de7a3144ed1ed")
    return scene


def busy() -> Scene:
    """A trainer in the middle of a round, with a transfer under way and many peers."""
    peers = [
        peer(1, role="trainer", received_bytes=21_400_000_000, received_bytes_per_second=11_300_000.0, version="0.419"),
        peer(2, role="seed", received_bytes=9_100_000_000, received_bytes_per_second=640_000.0, version="0.419"),
        peer(3, received_bytes=310_000_000, sent_bytes=18_200_000_000, sent_bytes_per_second=4_100_000.0),
        peer(4, sent_bytes=7_000_000_000, sent_bytes_per_second=2_200_000.0),
        peer(5, sent_bytes=2_400_000_000, sent_bytes_per_second=90_000.0, version="0.415"),
        peer(6, sent_bytes=96_000_000, version=None, role=None),
        *(peer(number) for number in range(7, 13)),
    ]
    rounds = [
        {
            "round": 418 - back,
            "kind": "receipt",
            "time_ms": NOW_MS - 61_000 * back - 20_000,
            "seconds": 61.0 + 3 * math.sin(back),
            "contributors": 6 if back != 2 else 5,
        }
        for back in range(8)
    ]
    scene = Scene(
        {
            "role": "trainer",
            "state": "committing",
            "version_lag": 2,
            "latest_seen_version": 419,
            "peers": 12,
            "peers_neighbour": 6,
            "peer_list": peers,
            "received_bytes_per_second": 11_940_000.0,
            "sent_bytes_per_second": 6_390_000.0,
            "fetch_wanted_bytes": 240_000_000,
            "fetch_held_bytes": 91_000_000,
            "fetch_sources": 2,
            "rounds_phase": "gathering",
            "rounds_reason": "",
            "round_index": 419,
            "round_contributors": 6,
            "rounds_behind": 0,
            "rounds_wanted_size_bytes": 412_000_000,
            "rounds_held_size_bytes": 180_000_000,
            "patch_size_bytes": 38_000_000,
            "patch_density_ratio": 0.0107,
            "utilization_ratio": 0.93,
            "utilization_predicted_ratio": 0.95,
            "rounds_recent": rounds,
            "fetch_shortfall": "thin-upload",
        },
        samples=SAMPLES_MAX + 40,
        busy=1.0,
    )
    for number in range(400, 420):
        scene.log("info", f"round {number - 1} is final: 6 contributions, outer step in 1.4 s")
        scene.log("debug" if number % 2 else "info", f"version 0.{number} committed, 38.1 MB, 1.07 % changed")
    scene.log("warning", "a bootstrap was not reached and is tried again later: /ip4/198.51.100.4/tcp/4001: refused")
    scene.log("info", "version 0.419 is being fetched from 2 peers")
    return scene


def stale() -> Scene:
    """An inferencer whose publisher has been away for 20 minutes."""
    scene = Scene(
        {
            "state": "waiting",
            "stale": True,
            "publisher_seen": False,
            "version_lag": None,
            "version_age_seconds": 1_240.0,
            "publisher_last_seen_timestamp_seconds": NOW_MS / 1000 - 1_240,
            "peers": 1,
            "peers_neighbour": 1,
            "peer_list": [peer(2, received_bytes=96_000_000)],
            "reachability": {"reachable": False, "advice": "forward TCP port 4001 to this machine, or dial out only"},
        },
        samples=900,
        busy=0.4,
    )
    scene.log("warning", "no head for 300 s: the node is stale, and keeps serving version 0.417")
    return scene


def forked() -> Scene:
    """A node that holds the proof that one version was signed twice, on a disk that is full too."""
    scene = Scene(
        {
            "state": "forked",
            "fork": True,
            "reason": "enospc",
            "version_lag": 1,
            "latest_seen_version": 418,
            "disk_free_bytes": 120_000_000,
        },
        samples=300,
        busy=0.7,
    )
    scene.log("error", "two manifests of version 0.418 are signed by 12D3KooWS2z8: the epoch is forked")
    return scene


def mixing() -> Scene:
    """A trainer of a run with gossip."""
    rounds = [
        {
            "round": 88 - back,
            "kind": "mixing",
            "time_ms": NOW_MS - 40_000 * back,
            "seconds": 40.0,
            "contributors": 4,
            "mix1": "open" if not back else "mixed",
            "mix2": "none" if back % 4 else "part",
        }
        for back in range(5)
    ]
    return Scene(
        {
            "role": "trainer",
            "mixing_phase": "training",
            "mixing_round": 88,
            "mixing_members": 4,
            "mixing_is_listed": True,
            "mixing_debts_owed": 1,
            "disagreement": 0.021,
            "disagreement_l2_end": 4.71,
            "disagreement_l2_bound": 6.02,
            "consensus": True,
            "utilization_ratio": 0.98,
            "rounds_recent": rounds,
        },
        samples=1_200,
        busy=0.5,
    )


def starting() -> Scene:
    """A node a second after its start: nothing is known."""
    return Scene(
        {
            "state": "starting",
            "uptime_seconds": 1.0,
            "applied_version": None,
            "latest_seen_version": None,
            "version_lag": None,
            "version_age_seconds": None,
            "publisher_seen": False,
            "peers": 0,
            "peer_list": [],
            "bytes": {},
            "store_bytes": 0,
            "received_bytes_per_second": None,
            "sent_bytes_per_second": None,
        }
    )


def hostile() -> Scene:
    """Whatever strangers can name holds markup."""
    scene = Scene(
        {
            "run": HOSTILE,
            "peer_list": [peer(1, role=HOSTILE, version=HOSTILE, peer_id=HOSTILE, received_bytes=5)],
            "reason": "",
            "rounds_phase": HOSTILE,
            "rounds_reason": HOSTILE,
            "round_index": 3,
            "round_stuck": True,
            "reachability": {"reachable": False, "advice": HOSTILE},
            "software": HOSTILE,
        },
        samples=20,
    )
    scene.log("warning", HOSTILE)
    scene.log("info", "two\nlines \x1b[31m and a colour")
    return scene


SCENES = {
    "idle": idle,
    "busy": busy,
    "stale": stale,
    "forked": forked,
    "mixing": mixing,
    "starting": starting,
    "hostile": hostile,
}


def _fill(history: History, fields: Mapping[str, Any], count: int, busy: float, chance: random.Random) -> None:
    applied = fields["applied_version"]
    for number in range(count):
        left = count - 1 - number
        burst = busy * max(0.0, math.sin(number / 9)) ** 3
        behind = left // 12
        rates = {name: fields[name] for name in ("received_bytes_per_second", "sent_bytes_per_second")}
        lag = fields["version_lag"] if left < 12 else int(busy * 2 * burst)
        history.add(
            NOW_MS - int(1000 * SAMPLE_SECONDS * left),
            {
                "received_bytes_per_second": 1.4e7 * burst * chance.uniform(0.7, 1.1),
                "sent_bytes_per_second": 9e6 * busy * max(0.0, math.sin(number / 9 - 1)) ** 2 * chance.uniform(0.6, 1),
                "version_lag": None if fields["stale"] and left < 180 else lag,
                "applied_version": None if applied is None else applied - (behind if busy else 0),
                "latest_seen_version": None
                if applied is None
                else fields["latest_seen_version"] - (behind if busy else 0),
                "utilization_ratio": _near(fields.get("utilization_ratio"), chance),
                "utilization_predicted_ratio": fields.get("utilization_predicted_ratio"),
                "disagreement": _near(fields.get("disagreement"), chance),
                **({} if left else rates),
            },
        )


def _near(value: float | None, chance: random.Random) -> float | None:
    return None if value is None else value * chance.uniform(0.96, 1.04)
