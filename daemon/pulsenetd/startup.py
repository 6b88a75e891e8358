"""Which run, which directory, which key: everything a node settles before it touches the network."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from pulsenet import limits
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor, JoinToken
from pulsenet.chain.signing import record_digest
from pulsenet.chain.token import decode_token
from pulsenet.errors import ConfigError, RemoteProtocolError, UsageError
from pulsenet.ids import RunId, short
from pulsenet.local.directories import data_home
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenetd import runs
from pulsenetd.config import Config
from pulsenetd.errors import DirectoryLockedError
from pulsenetd.identity import Identity, load, load_or_create
from pulsenetd.storage.disk import DirectoryLock, Disk, check_writable, find_partials, make_directory
from pulsenetd.storage.store import DATABASE_NAME

LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
EVERYWHERE: Final = "/ip4/0.0.0.0/tcp/0"
NODES_PER_ROLE_MAX: Final = 64
OPEN_INFERENCERS_LOCAL: Final = 64
"""Inferencers of the same machine whose rollouts the private run ``local`` takes."""

OPEN_TRAINERS_LOCAL: Final = 64
"""Trainers of the same machine whose contributions it takes, once it has rounds."""

WAIT_SECONDS: Final = 1.0
SECRET_SIZE_BYTES: Final = 16
LINK_DIGEST_SIZE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Settled:
    """What a node knows before it touches the network."""

    run_name: str
    run_path: Path
    token: JoinToken
    data_directory: Path
    lock: DirectoryLock
    identity: Identity
    is_local: bool
    """The run that lives on loopback and opened by itself."""
    has_token_ended: bool = False
    """Nobody joins by it any more; who joined before starts again with it."""

    @property
    def run_file(self) -> Path:
        """Where the run's live bootstraps stand."""
        return self.run_path / "run.json"

    @property
    def listen_address(self) -> str:
        """Where to listen when the operator did not say."""
        return LOOPBACK if self.is_local else EVERYWHERE


def settle(
    config: Config,
    environment: Mapping[str, str],
    *,
    say: Callable[[str], None],
    now_ms: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
) -> Settled:
    """Choose the run, lock a data directory and load the key.

    Args:
        config: The node's configuration.
        environment: Where data directories are looked up.
        say: Told what is being waited for, and what is wrong with the directory.
        now_ms: Unix time in milliseconds, for the token's expiry.
        sleep: Waits so many seconds.

    Raises:
        ConfigError: The token or run file is wrong, or there is no such run.
        DirectoryLockedError: ``--data-dir`` is in use.
        StorageError: The directory cannot be used.
    """
    name, token = _choose_run(config)
    path = data_home(environment) / name
    is_local = name == runs.LOCAL_RUN and token is None
    if not is_local:
        token = token or _read_token(path, name)
        _refuse_expired(token, path, now_ms())
        _refuse_other_run(path, name, token)
    directory, lock = _take_directory(config, path)
    _sweep(directory, path)
    risk = find_directory_risk(directory)
    if risk:
        say(risk)
    try:
        identity = load_or_create(directory / "identity.key")
        if token is None:
            if config.role == "trainer":
                _open_local_run(path, directory, identity)
            token = _wait_for_token(path, say, sleep)
            _refuse_expired(token, path, now_ms())
        else:
            runs.keep_token(path, name, token)
    except BaseException:
        lock.release()
        raise
    has_ended = token.expires_at_ms is not None and token.expires_at_ms < now_ms()
    return Settled(name, path, token, directory, lock, identity, is_local, has_ended)


def _choose_run(config: Config) -> tuple[str, JoinToken | None]:
    """Return the run's name on this machine, and its token if one was given."""
    if config.token and config.run_file:
        raise UsageError("give --token or --run-file, not both")
    if config.run_file:
        try:
            file = runs.read_run_file(Path(config.run_file))
        except FileNotFoundError:
            raise ConfigError(f"there is no run file {config.run_file}") from None
        return file.name, file.token
    if config.token:
        try:
            token = decode_token(config.token)
        except RemoteProtocolError as error:
            raise UsageError(f"--token: {error.detail}") from error
        named = config.run != runs.LOCAL_RUN
        return (config.run if named else token.run_id.hex()[:16]), token
    return config.run, None


def _take_directory(config: Config, run: Path) -> tuple[Path, DirectoryLock]:
    """Lock the directory asked for, or the first free one of the role."""
    if config.data_dir:
        directory = Path(config.data_dir).absolute()
        if os.path.realpath(directory) == os.path.realpath(run):
            # One lock would be two: the node's for its life, and the run's, which it takes for moments.
            raise ConfigError(f"{directory} is the run's own directory: give --data-dir one below it, or elsewhere")
        return directory, _lock(directory)
    for index in range(1, NODES_PER_ROLE_MAX + 1):
        directory = runs.node_path(run, config.role, index)
        try:
            return directory, _lock(directory)
        except DirectoryLockedError:
            continue
    raise ConfigError(f"{NODES_PER_ROLE_MAX} {config.role} nodes of this run are running here already")


def _sweep(directory: Path, run: Path) -> None:
    """Delete what was left half written: in the node's directory, which is locked, and long ago in the run's."""
    with suppress(OSError):  # what the disk does not let go harms nothing
        for path in (*find_partials(directory), *runs.find_unfinished(run)):
            path.unlink(missing_ok=True)


def leave_link(run: Path, directory: Path) -> None:
    """Let commands that look at all nodes of a run find one whose directory lies elsewhere."""
    if directory.resolve().parent.parent == run.resolve().parent:
        return
    name = f"{directory.name}@{blake3(os.fsencode(directory)).hexdigest(LINK_DIGEST_SIZE_BYTES)}"
    # It may be there already; and --data-dir finds the node where the disk takes no link.
    with suppress(OSError):
        (run / name).symlink_to(directory)


def _lock(directory: Path) -> DirectoryLock:
    make_directory(Disk(), directory)
    check_writable(directory)
    return DirectoryLock.acquire(directory)


def find_directory_risk(directory: Path) -> str:
    """Return what lets others replace a node's files, and what to do; empty if nothing does.

    It is no refusal: volumes of containers are often mounted so, and nobody else is in there.
    """
    status = directory.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        who = f"user {status.st_uid}"
        return f"{directory} belongs to {who}, who can replace this node's files: use a directory of your own"
    if mode & stat.S_IWOTH:
        what = f"put files into {directory} (mode {mode:04o})"
        return f"everybody on this machine can {what}, where this node keeps its own: run chmod 700 {directory}"
    return ""


def _open_local_run(path: Path, directory: Path, identity: Identity) -> None:
    """Make the private run of this machine, owned and published by the node of a directory, unless it exists."""
    has_run = (directory / DATABASE_NAME).exists()
    if has_run and not (path / "run.json").exists() and not runs.load_descriptors(path):
        # Its directory would be refused later, and the run be one in which only its key may publish.
        raise ConfigError(
            f"{directory} holds a node of another run than '{path.name}', which is not open here yet: give --run or "
            "--token, or another --data-dir"
        )
    make_directory(Disk(), path)
    # Two trainers started together: one opens the run, the other waits and finds it.
    lock = DirectoryLock.acquire(path, wait=True)
    try:
        records = runs.load_descriptors(path)
        if (path / "run.json").exists():
            return  # whatever is missing beside it: others may have joined by its token
        if not records:
            _create_local_run(path, identity)
        else:
            # A crash came between the two files. Nobody can have joined by a token that was never written.
            token = JoinToken(RunId(record_digest(records[0])), 0, (), secrets.token_bytes(SECRET_SIZE_BYTES), None)
            runs.write_run_file(path / "run.json", runs.RunFile(runs.LOCAL_RUN, token, ()))
    finally:
        lock.release()


def _create_local_run(path: Path, identity: Identity) -> None:
    owner = load_or_create(path / "owner.key")
    descriptor = runs.genesis(
        runs.LOCAL_RUN,
        nonce=secrets.token_bytes(16),
        owner=owner.peer_id,
        authorities=[identity.peer_id],
        trainers=[identity.peer_id],
        inferencers=[],
        open_inferencers_max=OPEN_INFERENCERS_LOCAL,
        private=True,
        anchor_interval=limits.ANCHOR_INTERVAL_DEFAULT,
        publish_interval_min_ms=0,
    )
    runs.create_run(
        path,
        descriptor,
        sign=owner.sign,
        owner=owner.peer_id,
        bootstraps=(),
        secret=secrets.token_bytes(SECRET_SIZE_BYTES),
        expires_at_ms=None,
    )


def take_up_rounds(run: Path) -> bool:
    """Give the run that opened by itself the algorithm PULSELoCo, and places for trainers of this machine.

    Returns:
        Whether the run has rounds now; not where the owner's key is elsewhere.
    """
    if not runs.load_descriptors(run) or not (run / "owner.key").exists():
        return False

    def give(descriptor: Descriptor) -> Descriptor:
        if descriptor.algorithm != ALGORITHM_NONE:
            raise _HasRoundsError
        return replace(
            descriptor,
            algorithm=str(Algorithm.PULSELOCO),
            constants=OuterSettings().to_constants(),
            open_trainers_max=OPEN_TRAINERS_LOCAL,
        )

    owner = load(run / "owner.key")
    with suppress(_HasRoundsError):
        runs.revise(run, give, sign=owner.sign, owner=owner.peer_id)
    return True


class _HasRoundsError(Exception):
    """Another node of the run was asked for rounds as well."""


def _read_token(path: Path, name: str) -> JoinToken:
    try:
        return runs.read_run_file(path / "run.json").token
    except FileNotFoundError:
        raise ConfigError(
            f"no run '{name}' on this machine; give --token, or create it with 'pulsenet run create {name}'"
        ) from None


def _wait_for_token(path: Path, say: Callable[[str], None], sleep: Callable[[float], None]) -> JoinToken:
    """Read the local run's file; a node that was started before the trainer waits for it."""
    said = False
    while True:
        try:
            return runs.read_run_file(path / "run.json").token
        except FileNotFoundError:
            pass
        if not said:
            say("waiting for 'pulsenet join --role trainer' on this machine")
            said = True
        sleep(WAIT_SECONDS)


def _refuse_expired(token: JoinToken, path: Path, now_ms: int) -> None:
    """Let nobody join by a token that has expired; who joined before starts again with it."""
    if token.expires_at_ms is None or now_ms <= token.expires_at_ms:
        return
    records = runs.load_descriptors(path)
    if not records or RunId(record_digest(records[0])) != token.run_id:
        raise ConfigError("the join token has expired; ask a member for another: 'pulsenet run token NAME'")


def _refuse_other_run(path: Path, name: str, token: JoinToken) -> None:
    """One name stands for one run: two would mix their descriptors and their nodes' stores."""
    try:
        known = runs.read_run_file(path / "run.json").token
    except FileNotFoundError:
        return
    if known.run_id != token.run_id:
        raise ConfigError(
            f"'{name}' is another run on this machine ({short(known.run_id)}..., not {short(token.run_id)}...); "
            "give this one another name with --run NAME"
        )
