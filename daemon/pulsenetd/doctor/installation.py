"""Checks of what is installed: packages, p2pd, and the keys' permissions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pulsenet.errors import ConfigError, StorageError
from pulsenetd import identity, runs
from pulsenetd.doctor.findings import Finding, Subject, fail, ok, split_step, warn
from pulsenetd.errors import P2pdError
from pulsenetd.network import p2pd_binary

PACKAGES: Final = (
    "numpy", "numba", "msgpack", "zstandard", "blake3", "xxhash", "hivemind", "uvloop", "prometheus-client",
    "cryptography",
)  # fmt: skip
"""What a node cannot do without."""
HIVEMIND_TESTED: Final = "1.1."
"""Versions of hivemind whose repairs are known to fit."""
PRIVATE_NAMES: Final = ("identity.key", "owner.key", "run.json")


def look_at_packages(
    _subject: Subject, version_of: Callable[[str], str] = importlib.metadata.version
) -> Sequence[Finding]:
    """Name versions; they belong into every report of a fault."""
    found: dict[str, str] = {}
    missing = []
    for name in ("pulsenet", *PACKAGES):
        try:
            found[name] = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return [fail(f"missing: {', '.join(missing)}", "pip install 'pulsenet[daemon]'")]
    found["python"] = platform.python_version()
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found["hivemind"].startswith(HIVEMIND_TESTED):
        return [warn(text, f"hivemind {found['hivemind']} was never tested: install 1.1.12")]
    return [ok(text)]


def look_at_p2pd(subject: Subject) -> Sequence[Finding]:
    """Say whether libp2p's daemon can run here."""
    try:
        binary = Path(subject.p2pd) if subject.p2pd else p2pd_binary.find()
        p2pd_binary.check(binary)
    except P2pdError as error:
        text, step = split_step(error)
        return [fail(text, step or "reinstall hivemind")]
    return [ok(str(binary))]


def look_at_keys(subject: Subject) -> Sequence[Finding]:
    """Say whether anybody else can read or replace keys and tokens of this machine, and whether they are whole."""
    count = 0
    problems = []
    for place in _private_places(subject):
        mode = stat.S_IMODE(place.stat().st_mode)
        if mode & 0o022:
            text = f"{place} can be written by others (mode {mode:04o}), who could replace its keys"
            problems.append(fail(text, f"chmod 700 {place}", partial(_close, place, 0o700)))
        for path in (place / name for name in PRIVATE_NAMES if (place / name).is_file()):
            count += 1
            problems += _judge_private(path)
        problems += _judge_run(place)
    return problems or [ok(f"{count} files, for their owner only" if count else "none on this machine yet")]


def _judge_private(path: Path) -> list[Finding]:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        text = f"{path} belongs to user {status.st_uid}, not to {os.geteuid()} who asks"
        return [warn(text, f"run this as the user of the node, or 'chown {os.geteuid()} {path}'")]
    if mode & 0o077:
        return [fail(f"{path} is open to others (mode {mode:04o})", f"chmod 600 {path}", partial(_close, path, 0o600))]
    if path.suffix != ".key":
        return []
    try:
        identity.load(path)
    except (StorageError, ConfigError) as error:
        return [fail(str(error), "restore it from a backup; docs/recovering.md says what a lost key means")]
    return []


def _judge_run(place: Path) -> list[Finding]:
    """Say whether what a run's directory holds for all its nodes can be read: none of them starts else."""
    reads: tuple[Callable[[], object], ...] = (
        lambda: runs.read_run_file(place / "run.json"),
        lambda: runs.load_descriptors(place),
        lambda: runs.load_epochs(place),
    )
    found = []
    for read in reads:
        try:
            read()
        except FileNotFoundError:
            continue
        except (ConfigError, StorageError) as error:
            text, step = split_step(error)
            found.append(fail(text, step or "run this as the user of the node"))
    return found


def _close(path: Path, mode: int) -> str:
    path.chmod(mode)
    return f"{path} is for its owner only now (mode {mode:04o})"


def _private_places(subject: Subject) -> list[Path]:
    places = {*subject.nodes, *(path for path in subject.home.glob("*") if path.is_dir())}
    places |= {path.parent for path in subject.home.glob("*/*/identity.key")}
    return sorted(place for place in places if place.is_dir())
