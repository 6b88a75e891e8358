"""What a node that was killed leaves behind: files that name a process which is gone."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pulsenet.local.sockets import socket_path
from pulsenetd import runs
from pulsenetd.doctor.findings import Finding, Subject, ok, warn
from pulsenetd.node_file import NODE_FILE
from pulsenetd.storage.disk import LOCK_NAME, PARTIAL_SUFFIX, DirectoryLock, find_partials, open_regular

P2PD_DIRECTORY: Final = "p2pd"


def is_running(node: Path) -> bool:
    """Return whether a process holds a node's directory."""
    try:
        descriptor = open_regular(node / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False  # no node starts there either
    try:
        # Shared, so that two who ask do not take one another for a node.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def look_at_leftovers(subject: Subject) -> Sequence[Finding]:
    """Name stale sockets, locks and half-written files of nodes that do not run; a start clears them too."""
    found = []
    for node in subject.nodes:
        if not node.is_dir() or is_running(node):
            continue
        stale = find_stale(node)
        if stale:
            names = ", ".join(path.name for path in stale[:3]) + (" ..." if len(stale) > 3 else "")
            found.append(
                warn(
                    f"{node}: {len(stale)} files of a process that is gone ({names})",
                    "start the node, which clears them",
                    partial(_clear, node),
                )
            )
    found += [_judge_run(run) for run in sorted(subject.home.glob("*")) if runs.find_unfinished(run)]
    return found or [ok("none: every node that does not run has left cleanly")]


def _judge_run(run: Path) -> Finding:
    names = ", ".join(path.name for path in runs.find_unfinished(run)[:3])
    text = f"{run}: files that a process began to write and left ({names}), which may hold keys"
    return warn(text, "start a node of the run, which clears them", partial(_clear_run, run))


def _clear_run(run: Path) -> str:
    left = runs.find_unfinished(run)
    for path in left:
        path.unlink(missing_ok=True)
    return f"{run}: {len(left)} unfinished files deleted"


def find_stale(node: Path) -> list[Path]:
    """Return what only a running node should have."""
    sockets = [path for path in (node / P2PD_DIRECTORY).glob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    named = [path for path in (node / NODE_FILE, socket_path(node)) if path.exists()]
    partials = [*find_partials(node), *node.glob(f"chunks/*/*{PARTIAL_SUFFIX}")]
    return [*named, *sockets, *partials]


def _clear(node: Path) -> str:
    lock = DirectoryLock.acquire(node)
    try:
        stale = find_stale(node)
        for path in stale:
            path.unlink(missing_ok=True)
    finally:
        lock.release()
    return f"{node}: {len(stale)} stale files deleted"
