"""What is to be said of a node in words: cause and next step of everything that is not as it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from pulsenet import limits
from pulsenetd.metrics import DISK_REASONS
from pulsenetd.words import say_seconds, say_size, say_version

Status = Mapping[str, Any]

DISK_LOW_BYTES: Final = 1 << 30
"""``pulsenet doctor`` lets no node start with less."""

LONELY_SECONDS: Final = 30.0
"""A node that has just started looks for peers."""


class Level(StrEnum):
    """How bad it is, the worst first."""

    ERROR = "error"
    """The node does not do its work, and will not by itself."""
    WARNING = "warning"
    """It works worse than it could, or soon will not."""
    NOTE = "note"
    """It waits for something, as nodes do."""
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing an operator should know."""

    code: str
    level: Level
    title: str
    cause: str
    next_step: str


_STALLS: Final = {
    "no-source": (
        "No peer has what is missing",
        "No connected peer says that it holds it.",
        "Wait for a seed or the trainer to come back, or start a seed.",
    ),
    "standby": (
        "Another authority publishes",
        "It coordinates in this term; this node takes over when it is lost.",
        "Nothing to do.",
    ),
    "superseded": (
        "Another authority opened a newer epoch",
        "Its versions count from now on, and what this node offers does not.",
        "Find out who publishes with which key; restart this trainer to follow on.",
    ),
}
"""Reasons of machines, in words."""

_DISK: Final = {
    "enospc": ("The disk is full", "Free some space, or lower --store-limit-bytes; the node goes on by itself."),
    "readonly": ("The disk is read-only", "Look at 'dmesg' and mount it writable; the node goes on by itself."),
    "memory": ("The memory is used up", "End other programs, or raise the limit; the node goes on by itself."),
    "damaged": ("Something on the disk is damaged", "Stop the node and run 'pulsenet scrub'; then look at the disk."),
    "locked": ("Another process holds the database", "Find what else opens the data directory, and end it."),
    "io": ("The disk fails", "Look at 'dmesg' and at the disk."),
}
assert set(_DISK) == set(DISK_REASONS)

_SHORTFALLS: Final = {
    "thin-upload": (
        "Readers upload too little",
        "The publisher sends what other readers should.",
        "Raise --upload-limit of readers, or start a seed.",
    ),
    "no-readers": (
        "Other readers cannot be reached",
        "The publisher serves this node alone.",
        "Run 'pulsenet doctor' on readers: it says how to become reachable.",
    ),
}


def find_conditions(status: Status) -> list[dict[str, str]]:
    """Return what is to be said, the worst first; one condition of level ``ok`` if there is nothing else.

    Args:
        status: Fields of ``/status``.
    """
    found = [one for check in _CHECKS for one in check(status)]
    levels = list(Level)
    found.sort(key=lambda one: levels.index(one.level))
    if not any(one.level in (Level.ERROR, Level.WARNING) for one in found) and not _is_waiting(found):
        found.insert(0, _fine(status))
    return [{**asdict(one), "level": str(one.level)} for one in found]


def _is_waiting(found: list[Condition]) -> bool:
    return any(one.code in ("starting", "not-heard", "behind") for one in found)


def _fine(status: Status) -> Condition:
    version = say_version(status)
    text = (
        f"It holds version {version}, the newest there is."
        if version
        else "It is connected and has nothing to catch up."
    )
    return Condition("ready", Level.OK, "Ready", text, "Nothing to do.")


def _look_at_loop(status: Status) -> Iterator[Condition]:
    if status.get("event_loop_turns") is False:
        yield Condition(
            "loop-stuck",
            Level.ERROR,
            "The node stands still",
            "Its event loop has not turned for 15 s or more: a disk that hangs, or a machine out of memory.",
            "It ends itself after --watchdog-seconds; run it under systemd or --supervise to be started again.",
        )


def _look_at_fork(status: Status) -> Iterator[Condition]:
    if status.get("fork"):
        yield Condition(
            "fork",
            Level.ERROR,
            "Fork: one version was signed twice",
            "An authority's key signed two different versions under one number: it is in two places, or leaked. "
            "The node keeps what it has and takes nothing more of this epoch.",
            "On the owner's machine run 'pulsenet run show NAME', revoke the key if it leaked, and open a new epoch: "
            "docs/security.md.",
        )


def _look_at_disk(status: Status) -> Iterator[Condition]:
    for reason in {status.get("reason"), status.get("rounds_reason")} & set(_DISK):
        title, next_step = _DISK[str(reason)]
        cause = f"The disk refused to store what was fetched ({reason}). What is held is still served."
        yield Condition(f"disk-{reason}", Level.ERROR, title, cause, next_step)
    free = status.get("disk_free_bytes")
    if free is not None and free < DISK_LOW_BYTES:
        yield Condition(
            "disk-low",
            Level.WARNING,
            "The disk is nearly full",
            f"{say_size(free)} are free where the data directory lies.",
            "Free some, or lower --store-limit-bytes.",
        )
    damaged = status.get("store_damaged_chunks") or 0
    if damaged:
        yield Condition(
            "damaged",
            Level.WARNING,
            "Chunks on the disk were damaged",
            f"{damaged} were found since the start and are fetched again; damaged bytes are never served.",
            "Look at the disk: it should not happen twice.",
        )


def _look_at_network(status: Status) -> Iterator[Condition]:
    uptime = status.get("uptime_seconds") or 0.0
    if status.get("p2pd_healthy") is False:
        yield Condition(
            "p2pd",
            Level.ERROR,
            "The network is down",
            "p2pd, which carries every connection, does not answer.",
            "It is restarted within seconds; if it stays so, look at the log for the reason.",
        )
    elif not status.get("peers") and uptime >= LONELY_SECONDS:
        yield Condition(
            "no-peers",
            Level.WARNING,
            "Nobody is connected",
            "No peer of the run could be reached, and none dialled this node.",
            "Run 'pulsenet doctor' with this run: it tries each bootstrap and says why it fails.",
        )
    reachability = status.get("reachability") or {}
    if reachability.get("reachable") is False:
        level = Level.WARNING if status.get("role") == "seed" else Level.NOTE
        advice = _sentence(str(reachability.get("advice") or "open or forward the port; see docs/network.md"))
        cause = "Peers that were asked could not dial back. It works by the connections it opens itself."
        yield Condition("unreachable", level, "Nobody can dial this node", cause, advice)
    offset = status.get("clock_offset_seconds")
    if offset is not None and abs(offset) > limits.CLOCK_OFFSET_SECONDS_MAX:
        yield Condition(
            "clock",
            Level.WARNING,
            "The clock is wrong",
            f"It runs {say_seconds(abs(offset))} {'ahead of' if offset > 0 else 'behind'} the peers' median, so that "
            "records expire at the wrong time.",
            "Run 'timedatectl set-ntp true', or set the host's clock if this is a container.",
        )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _look_at_publisher(status: Status) -> Iterator[Condition]:
    is_trainer = status.get("role") == "trainer"
    # In rounds and mixing only the coordinator publishes.
    if status.get("reason") == "not_publisher" and not (status.get("rounds_phase") or status.get("mixing_phase")):
        yield Condition(
            "not-publisher",
            Level.WARNING,
            "This key may not publish",
            "The run does not list it as an authority, so what the training loop hands over is refused.",
            "Let the run's owner run 'pulsenet run promote NAME KEY' with this node's peer id.",
        )
    if status.get("stale"):
        issued, now_ms = status.get("publisher_last_seen_timestamp_seconds"), status.get("now_ms")
        ago = f" for {say_seconds(now_ms / 1000 - issued)}" if issued and now_ms else ""
        yield Condition(
            "stale",
            Level.WARNING,
            "Stale: nobody says what is newest",
            f"No authority has signed a head{ago}: no publisher is up, or there is no way to it.",
            "Start the trainer again if it is yours; otherwise look at the peers below and run 'pulsenet doctor'.",
        )
    elif status.get("state", "starting") == "starting" and status.get("latest_seen_version") is None:
        yield Condition(
            "starting", Level.NOTE, "Starting", "The node is looking for its run and its peers.", "Wait a moment."
        )
    elif not status.get("publisher_seen"):
        yield Condition(
            "not-heard",
            Level.NOTE,
            "Nothing was published yet" if is_trainer else "No publisher was heard yet",
            "No version of this run exists here."
            if is_trainer
            else "No signed head has come, so nobody knows the lag.",
            "Let the training loop publish: pulsenet.attach_publisher()."
            if is_trainer
            else "Wait, or start the trainer.",
        )


def _look_at_version(status: Status) -> Iterator[Condition]:
    reason, lag = status.get("reason") or "", status.get("version_lag")
    if status.get("last_update_failed"):
        yield Condition(
            "update-failed",
            Level.WARNING,
            "The last update failed",
            "A version could not be checked or handed to the engine; the one before is still in use.",
            "Filter the log below for warnings; the node tries again with the next version, or whole.",
        )
    if reason in _STALLS:
        title, cause, next_step = _STALLS[reason]
        yield Condition(reason, Level.NOTE if reason == "standby" else Level.WARNING, title, cause, next_step)
    elif status.get("state") == "stalled":
        cause = f"What peers offer leads to no newer version ({reason or 'no reason given'})."
        yield Condition("stalled", Level.WARNING, "No way to the newest version", cause, "Wait for the next anchor.")
    if lag and not status.get("fork"):
        text = f"The newest is {say_version(status, 'latest_seen')}."
        title = f"{lag} version{'s' if lag > 1 else ''} behind"
        yield Condition("behind", Level.NOTE, title, text, "Nothing to do while the transfer below moves.")
    shortfall = _SHORTFALLS.get(str(status.get("fetch_shortfall") or ""))
    if shortfall is not None:
        yield Condition(str(status["fetch_shortfall"]), Level.NOTE, *shortfall)
    if status.get("engine_ready") is False:
        yield Condition(
            "engine",
            Level.WARNING,
            "The engine is not ready",
            "It does not answer, or holds no version yet.",
            "Look at the engine's own log; docs/vllm.md.",
        )


def _look_at_rounds(status: Status) -> Iterator[Condition]:
    phase, reason = status.get("rounds_phase"), status.get("rounds_reason") or ""
    if status.get("round_stuck"):
        yield Condition(
            "round-stuck",
            Level.WARNING,
            "A round does not end",
            f"Round {status.get('round_index')} takes longer than --round-seconds "
            f"({phase}{f', {reason}' if reason else ''}).",
            "Look at 'pulsenet status' on the coordinator and at slow trainers.",
        )
    elif reason == "no-coordinator":
        yield Condition(
            "no-coordinator",
            Level.WARNING,
            "No coordinator is heard",
            "The contribution of this trainer waits for a receipt.",
            "Start authorities again: more than half of them are needed, one of them training.",
        )
    elif phase == "joining":
        cause = f"It fetches a state anchor of the rounds first{f' ({reason})' if reason else ''}."
        yield Condition("joining", Level.NOTE, "Joining the rounds", cause, "Nothing to do.")
    if status.get("rounds_behind"):
        cause = f"{status['rounds_behind']} final rounds are still to be stepped here."
        yield Condition("rounds-behind", Level.NOTE, "Behind in the rounds", cause, "Nothing to do while it shrinks.")
    if status.get("consensus") is False:
        yield Condition(
            "no-consensus",
            Level.NOTE,
            "The newest version is one trainer's own",
            "No whole global mean came of its round, or the run's variant makes none.",
            "Nothing to do in variants without global means; in others look for mixings that were late or refused.",
        )
    if status.get("mixing_phase") is not None and status.get("mixing_is_listed") is False:
        yield Condition(
            "unlisted",
            Level.NOTE,
            "Not in the roster yet",
            "The coordinator's newest roster does not list this trainer, so nobody mixes with it.",
            "Wait for the next roster; if it lasts, the coordinator does not hear this node.",
        )


_CHECKS: Final[tuple[Callable[[Status], Iterator[Condition]], ...]] = (
    _look_at_loop,
    _look_at_fork,
    _look_at_disk,
    _look_at_network,
    _look_at_publisher,
    _look_at_version,
    _look_at_rounds,
)
