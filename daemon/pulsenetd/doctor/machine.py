"""Checks of the machine itself: clock, disk, memory, files, congestion control."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pulsenet.local.shared_memory import read_container_room_bytes
from pulsenetd.doctor.findings import Finding, Subject, fail, ok, warn

GIB: Final = 1 << 30
DISK_FAIL_BYTES: Final = GIB
DISK_WARN_BYTES: Final = 10 * GIB
MEMORY_FAIL_BYTES: Final = GIB
"""An idle node takes 230 MB before the first weight, and 370 MB while it compiles its loops."""
MEMORY_WARN_BYTES: Final = 4 * GIB
FILES_LEFT_MIN: Final = 1_000
"""Each MiB of weights is a file."""
FILES_WARN: Final = 4_096
"""Each of up to 256 peers may have several streams, and each stream is a file here and one in p2pd."""

_TIME_ERROR: Final = 5
_TIMEX_SIZE_BYTES: Final = 512
"""More than any kernel's ``struct timex``; all zero asks and sets nothing."""


def is_clock_synchronised() -> bool | None:
    """Return whether the kernel says a time service keeps the clock; ``None`` if it will not say."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        state = int(library.adjtimex(ctypes.create_string_buffer(_TIMEX_SIZE_BYTES)))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def look_at_clock(_subject: Subject, ask: Callable[[], bool | None] = is_clock_synchronised) -> Sequence[Finding]:
    """Say whether something keeps the clock right; how far it is off, only peers know (``node`` tells)."""
    match ask():
        case True:
            return [ok("kept right by a time service")]
        case False:
            return [
                warn(
                    "no time service keeps it right; more than 3 s off, records expire at the wrong time",
                    "run 'timedatectl set-ntp true', or set the host's clock if this is a container",
                )
            ]
        case None:
            return [warn("the kernel does not tell whether it is right", "compare 'date -u' with another machine")]


def look_at_disk(subject: Subject) -> Sequence[Finding]:
    """Say how much room there is where runs and nodes live, and whether a node may write there."""
    found: dict[int, Finding] = {}
    problems = []
    for path in (*subject.nodes, subject.home):
        place = _existing(path)
        if not place.is_dir():
            problems.append(fail(f"{place} is no directory", "move it away, set XDG_DATA_HOME, or give --data-dir"))
        elif not os.access(place, os.W_OK | os.X_OK):
            problems.append(fail(f"{place} cannot be written", _explain_refusal(place)))
        else:
            found.setdefault(place.stat().st_dev, _judge_room(place))  # one line a file system
    return [*problems, *found.values()]


def _explain_refusal(place: Path) -> str:
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return "its file system is read-only: look at 'dmesg' for the reason, or give --data-dir on another"
    return "give it to this user with chown, set XDG_DATA_HOME, or give --data-dir"


def _judge_room(place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free at {place}"
    files = os.statvfs(place)
    if files.f_files and files.f_favail < FILES_LEFT_MIN:
        return fail(
            f"room for {files.f_favail} more files at {place}", "delete small files, or use another file system"
        )
    if free < DISK_FAIL_BYTES:
        return fail(text, "free some, or give --data-dir on another disk; docs/recovering.md, 'The disk is full'")
    if free < DISK_WARN_BYTES:
        return warn(text, "enough for small models only: two anchors and the patches since must fit")
    return ok(text)


def look_at_memory(subject: Subject) -> Sequence[Finding]:
    """Say how much memory a node may still take, here or in this container."""
    available = _read_kibibytes(subject.proc / "meminfo", "MemAvailable:")
    if available is None:
        return [warn("the kernel does not tell how much is free", "compare the model's size with what 'free' shows")]
    where = "free"
    room = read_container_room_bytes(subject.cgroup)
    if room is not None and room < available:
        available, where = room, "left within this container's limit"
    text = f"{available / GIB:.1f} GiB {where}"
    if available < MEMORY_FAIL_BYTES:
        return [fail(text, "end other programs, or raise the limit")]
    if available < MEMORY_WARN_BYTES:
        return [warn(text, "a node holds one copy of the weights in memory: enough for small models only")]
    return [ok(text)]


def look_at_files(
    _subject: Subject, limits: Callable[[int], tuple[int, int]] = resource.getrlimit
) -> Sequence[Finding]:
    """Say how many files a process may have open."""
    soft, _ = limits(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES_WARN:
        return [warn(f"a process may open {soft}", f"'ulimit -n {FILES_WARN}' before the start, or LimitNOFILE=")]
    return [ok(f"a process may open {'any number' if soft < 0 else soft}")]


def look_at_congestion_control(subject: Subject) -> Sequence[Finding]:
    """Name TCP's congestion control: over lossy links it decides how much of the bandwidth a sender uses."""
    ipv4 = subject.proc / "sys" / "net" / "ipv4"
    name = _read_text(ipv4 / "tcp_congestion_control")
    if not name:
        return [warn("the kernel does not name it", "look at 'sysctl net.ipv4.tcp_congestion_control' on the host")]
    if name == "bbr":
        return [ok("bbr")]
    present = "bbr" in _read_text(ipv4 / "tcp_available_congestion_control").split()
    order = "sysctl -w net.ipv4.tcp_congestion_control=bbr"
    return [
        warn(
            f"{name}; over lossy links a sender with bbr keeps far more of the bandwidth",
            f"as root: {order if present else f'modprobe tcp_bbr && {order}'}",
        )
    ]


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _read_kibibytes(path: Path, field: str) -> int | None:
    for line in _read_text(path).splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    return None
