"""A run as this machine knows it: its directory, its run file, its descriptor revisions.

::

    $XDG_DATA_HOME/pulsenet/<run>/
        run.json            0600: run id, token, live bootstraps
        descriptors/        one signed revision per file, 000000.record is the genesis
        epochs/             epochs that the owners opened, one signed record per file
        owner.key           0600, only where the run was created
        trainer/ inferencer/ inferencer-2/ ...   one directory per node
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pulsenet import limits
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor, EpochRecord, JoinToken, SignedRecord
from pulsenet.chain.signing import (
    add_signature,
    decode_signed,
    encode_signed,
    keep_signatures,
    record_digest,
    seal,
    signed_bytes,
)
from pulsenet.chain.token import decode_token, encode_token
from pulsenet.errors import ConfigError, PulsenetError, StorageError
from pulsenet.ids import PeerId, RunId
from pulsenet.local.directories import RUN_NAME_DEFAULT
from pulsenet.wire.schema import decode_value
from pulsenetd.config import check_run_name
from pulsenetd.storage.disk import (
    DirectoryLock,
    Disk,
    find_partials,
    make_directory,
    read_regular,
    remove_durably,
    write_durably,
)

LOCAL_RUN: Final = RUN_NAME_DEFAULT
"""The run that opens by itself, on loopback, when nothing else is asked for."""

RUN_FILE_SIZE_BYTES_MAX: Final = 64 << 10

UNFINISHED_SECONDS_MIN: Final = 3_600.0
"""Writing one of these small files takes a moment."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """What the run file says."""

    name: str
    token: JoinToken
    bootstraps: tuple[str, ...]
    """Addresses of nodes of this machine that were live when the file was written."""


@dataclass(frozen=True, slots=True)
class Signatures:
    """How many owners signed a revision, or an epoch, and how many have to."""

    number: int
    """Of the revision or epoch."""
    count: int
    needed: int

    @property
    def is_complete(self) -> bool:
        """Whether it counts."""
        return self.count >= self.needed


def node_path(run: Path, role: str, index: int) -> Path:
    """Return the directory of the ``index``-th node of a role, counted from 1."""
    return run / (role if index == 1 else f"{role}-{index}")


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically, and make its directory; it is readable by its owner only from its first byte.

    Raises:
        StorageError: The disk refused.
    """
    make_directory(Disk(), path.parent)
    write_durably(Disk(), path, data)


def write_run_file(path: Path, run: RunFile) -> None:
    """Write a run file (mode 0600: a private run's token is a secret)."""
    text = json.dumps(
        {
            "name": run.name,
            "run_id": run.token.run_id.hex(),
            "token": encode_token(run.token),
            "bootstraps": list(run.bootstraps),
        },
        indent=2,
    )
    write_private(path, text.encode() + b"\n")


def read_run_file(path: Path) -> RunFile:
    """Read a run file.

    Raises:
        FileNotFoundError: There is none (yet).
        ConfigError: It is not a run file.
    """
    try:
        data = read_regular(path, RUN_FILE_SIZE_BYTES_MAX)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read run file {path}: {error.strerror}") from error
    try:
        table: dict[str, Any] = json.loads(data)
        bootstraps = tuple(str(address) for address in table["bootstraps"])
        name = str(table["name"])
        check_run_name(name)  # a file from somebody else must not choose a directory anywhere on this machine
        return RunFile(name, decode_token(table["token"]), bootstraps)
    except (ValueError, KeyError, TypeError, RecursionError, PulsenetError) as error:
        is_local = path.parent.name == LOCAL_RUN  # nobody has a token of that one
        step = "start a trainer of the run: it makes another" if is_local else "join with --token again"
        raise ConfigError(f"{path} is not a run file ({error}); delete it, then {step}") from error


def find_unfinished(run: Path) -> list[Path]:
    """Return files of a run's directory that a process began to write long ago, keys perhaps, and was killed.

    Raises:
        OSError: The directory cannot be read.
    """
    # By age, because several processes write there.
    places = (run, run / "descriptors", run / "epochs")
    return [path for place in places for path in find_partials(place, seconds_min=UNFINISHED_SECONDS_MIN)]


def list_tokens(home: Path) -> dict[str, JoinToken]:
    """Return the token of every run that this machine knows, by the name it has here.

    A run that was joined by its token has two names where it was also created. What cannot be read is no run.
    """
    tokens = {}
    for path in sorted(home.glob("*/run.json")):
        with suppress(OSError, ConfigError):
            tokens[path.parent.name] = read_run_file(path).token
    return tokens


def save_descriptor(run: Path, signed: SignedRecord) -> None:
    """Keep one descriptor revision beside the run file."""
    write_private(_descriptor_path(run, decode_value(Descriptor, signed.payload).revision), encode_signed(signed))


def _descriptor_path(run: Path, revision: int) -> Path:
    return run / "descriptors" / f"{revision:06d}.record"


def load_descriptors(run: Path) -> list[SignedRecord]:
    """Return the stored revisions in ascending order; empty when none is known yet.

    Raises:
        StorageError: One of the files is damaged.
    """
    return _load_records(run / "descriptors", Descriptor)


def save_epoch(run: Path, signed: SignedRecord) -> None:
    """Keep an epoch record of the owners beside the run file."""
    epoch = decode_value(EpochRecord, signed.payload).epoch
    write_private(run / "epochs" / f"{epoch:019d}.record", encode_signed(signed))


def load_epochs(run: Path) -> list[SignedRecord]:
    """Return the epoch records of the owners, ascending; empty where they opened none.

    Raises:
        StorageError: One of the files is damaged.
    """
    return _load_records(run / "epochs", EpochRecord)


def open_epoch(
    run: Path, record: Callable[[Descriptor, RunId], EpochRecord], *, sign: Callable[[bytes], bytes], owner: PeerId
) -> tuple[EpochRecord, Signatures]:
    """Sign, as an owner, the record that says with which version the run goes on.

    Returns:
        The record, and its signatures.

    Raises:
        ConfigError: There is no run here, its newest revision lacks signatures, or the key is none of its owners'.
    """
    with _changing(run):
        records, current = _find_complete(run, owner)
        made = record(current, RunId(record_digest(records[0])))
        signed = seal(made, sign, owner)
        save_epoch(run, signed)
    return made, Signatures(made.epoch, len(signed.signers), current.owner_threshold)


def countersign_epoch(run: Path, *, sign: Callable[[bytes], bytes], owner: PeerId) -> Signatures:
    """Add an owner's signature to the newest epoch record of the owners; return what it has now.

    Raises:
        ConfigError: There is none here, or the key is none of the run's owners'.
    """
    with _changing(run):
        _, current = _find_complete(run, owner)
        epochs = load_epochs(run)
        if not epochs:
            raise ConfigError(f"the owners opened no epoch in {run}")
        signed = add_signature(epochs[-1], sign, owner)
        save_epoch(run, signed)
    number = decode_value(EpochRecord, signed.payload).epoch
    return Signatures(number, len(signed.signers), current.owner_threshold)


def genesis(
    name: str,
    *,
    nonce: bytes,
    owner: PeerId,
    authorities: Iterable[PeerId],
    trainers: Iterable[PeerId],
    inferencers: Iterable[PeerId],
    open_inferencers_max: int,
    private: bool,
    anchor_interval: int,
    publish_interval_min_ms: int,
    algorithm: str = ALGORITHM_NONE,
    constants: tuple[tuple[str, int], ...] = (),
    open_trainers_max: int = 0,
) -> Descriptor:
    """Return the genesis descriptor of a run with one owner; table and base are fixed by the first publish."""
    return Descriptor(
        name=name,
        nonce=nonce,
        revision=0,
        previous=None,
        owners=(owner,),
        owner_threshold=1,
        authorities=tuple(sorted(set(authorities))),
        trainers=tuple(sorted(set(trainers))),
        inferencers=tuple(sorted(set(inferencers))),
        open_trainers_max=open_trainers_max,
        open_inferencers_max=open_inferencers_max,
        private=private,
        table_digest=None,
        base_root=None,
        base_blob_id=None,
        algorithm=algorithm,
        constants=constants,
        publish_interval_min_ms=publish_interval_min_ms,
        anchor_interval=anchor_interval,
        wire_version_min=limits.WIRE_VERSION,
        wire_version_max=limits.WIRE_VERSION,
    )


def create_run(
    run: Path,
    descriptor: Descriptor,
    *,
    sign: Callable[[bytes], bytes],
    owner: PeerId,
    bootstraps: tuple[str, ...],
    secret: bytes,
    expires_at_ms: int | None,
) -> RunFile:
    """Sign the genesis and write the run's directory.

    Raises:
        ConfigError: The run exists already.
        StorageError: The disk refused.
    """
    refuse_existing(run, descriptor.name)
    signed = seal(descriptor, sign, owner)
    run_id = RunId(record_digest(signed))
    token = JoinToken(run_id, 0, bootstraps, secret, expires_at_ms)
    file = RunFile(descriptor.name, token, bootstraps)
    save_descriptor(run, signed)
    try:
        write_run_file(run / "run.json", file)
    except StorageError:
        _descriptor_path(run, descriptor.revision).unlink(missing_ok=True)  # the next try finds no run here
        raise
    return file


def renew_token(run: Path, expires_at_ms: int | None, bootstraps: tuple[str, ...]) -> RunFile:
    """Give the run's token another end, and other addresses if there are any; nodes that start from now on print it.

    Raises:
        ConfigError: The run's file is gone or damaged.
        StorageError: The disk refused.
    """
    with _changing(run):
        file = read_own_file(run)
        token = replace(file.token, expires_at_ms=expires_at_ms, bootstraps=bootstraps or file.token.bootstraps)
        renewed = replace(file, token=token, bootstraps=bootstraps or file.bootstraps)
        write_run_file(run / "run.json", renewed)
    return renewed


def keep_token(run: Path, name: str, token: JoinToken) -> None:
    """Write down the token that a node joins by, unless the one that is there ends as late or later.

    Raises:
        ConfigError: The run's file is damaged.
        StorageError: The disk refused.
    """
    path = run / "run.json"
    if not path.exists():
        write_run_file(path, RunFile(name, token, ()))
        return
    with _changing(run):
        file = read_run_file(path)
        if file.token.expires_at_ms is not None and (token.expires_at_ms or math.inf) > file.token.expires_at_ms:
            addresses = token.bootstraps or file.token.bootstraps
            kept = replace(file.token, expires_at_ms=token.expires_at_ms, bootstraps=addresses)
            write_run_file(path, replace(file, token=kept))


def read_own_file(run: Path) -> RunFile:
    """Return the run file of a run that this machine knows.

    Raises:
        ConfigError: It is gone or damaged.
    """
    try:
        return read_run_file(run / "run.json")
    except FileNotFoundError:
        raise ConfigError(f"{run / 'run.json'}, which holds the token, is gone; join with --token again") from None


def refuse_existing(run: Path, name: str) -> None:
    """Refuse to make a run where there is one.

    Raises:
        ConfigError: There is one.
    """
    if not load_descriptors(run):
        return
    if (run / "run.json").exists():
        raise ConfigError(f"run '{name}' exists already in {run}; choose another name or remove it")
    # Killed between its two files, or the second was deleted: the first may be all that is left of a run that lives.
    raise ConfigError(
        f"run '{name}' has no run.json in {run}; join it by its token, or if it was never made to its end, "
        f"remove {run / 'descriptors'} and create it again"
    )


def revise(
    run: Path, change: Callable[[Descriptor], Descriptor], *, sign: Callable[[bytes], bytes], owner: PeerId
) -> tuple[Descriptor, Signatures]:
    """Sign the next revision of a run's descriptor.

    Returns:
        The new descriptor, and its signatures.

    Raises:
        ConfigError: There is no run here, or the key is not one of its owners.
        Exception: What ``change`` raises; nothing is written then.
    """
    with _changing(run):
        records, current = _find_complete(run, owner)
        changed = replace(change(current), revision=current.revision + 1, previous=record_digest(records[-1]))
        signed = seal(changed, sign, owner)
        save_descriptor(run, signed)
    return changed, Signatures(changed.revision, len(signed.signers), current.owner_threshold)


def countersign(run: Path, *, sign: Callable[[bytes], bytes], owner: PeerId) -> Signatures:
    """Add an owner's signature to the newest revision; return what it has now.

    Raises:
        ConfigError: There is no run here, or the key is not one of its owners.
    """
    with _changing(run):
        records = load_descriptors(run)
        if not records:
            raise ConfigError(f"no run in {run}")
        judge = _judge(records)
        _check_owner(judge, owner)
        # Beside one that is no owner's, or false, none counts: a copy may have come from anybody.
        records[-1] = add_signature(_keep_believed(records[-1], judge), sign, owner)
        save_descriptor(run, records[-1])
    return count_signatures(records)


def withdraw(run: Path) -> int:
    """Take back the newest revision, which lacks signatures; return its number.

    Raises:
        ConfigError: There is no run here, its newest revision counts, so that another one has to change it back, or
            the files beside it leave open which one it is.
        StorageError: The disk refused.
    """
    with _changing(run):
        records = load_descriptors(run)
        if not records:
            raise ConfigError(f"no run in {run}")
        signatures = count_signatures(records)
        if signatures.is_complete or signatures.number == 0:
            raise ConfigError(f"revision {signatures.number} counts already; change the run back by another one")
        path = _descriptor_path(run, signatures.number)
        numbers = [decode_value(Descriptor, signed.payload).revision for signed in records]
        if numbers != list(range(len(records))) or not path.is_file():
            # By a copy of a revision that counts, the file of that revision would be deleted.
            raise ConfigError(f"{path.parent} does not hold one file for each revision; move copies away")
        remove_durably(Disk(), path)
    return signatures.number


def count_signatures(records: list[SignedRecord]) -> Signatures:
    """Return what the newest of a run's revisions has; signatures that no node believes are none."""
    revision, judge = decode_value(Descriptor, records[-1].payload).revision, _judge(records)
    return Signatures(revision, len(_keep_believed(records[-1], judge).signers), judge.owner_threshold)


@contextmanager
def _changing(run: Path) -> Iterator[None]:
    """Keep other commands and nodes out: each of two would sign a revision of one number, and all nodes refuse one."""
    # Where there is no directory the block finds nothing to change, and says so.
    lock = DirectoryLock.acquire(run, wait=True) if run.is_dir() else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _find_complete(run: Path, owner: PeerId) -> tuple[list[SignedRecord], Descriptor]:
    """Return the revisions and the newest of them, which has all its signatures, for one of its owners."""
    records = load_descriptors(run)
    if not records:
        raise ConfigError(f"no run in {run}; create it with 'pulsenet run create' on the owner's machine")
    current = decode_value(Descriptor, records[-1].payload)
    _check_owner(current, owner)
    if not count_signatures(records).is_complete:
        raise ConfigError(
            f"revision {current.revision} lacks signatures: let the other owners 'pulsenet run countersign' it first, "
            "or take it back with 'pulsenet run withdraw'"
        )
    return records, current


def _judge(records: list[SignedRecord]) -> Descriptor:
    """Return the descriptor whose owners have to sign the newest revision: the one before, or the genesis itself."""
    return decode_value(Descriptor, records[max(len(records) - 2, 0)].payload)


def _keep_believed(signed: SignedRecord, judge: Descriptor) -> SignedRecord:
    """Return a revision with the signatures that its owners did make."""
    from pulsenetd import identity  # late: it needs packages that most of this module does without

    message = signed_bytes(signed.type, signed.payload)
    made = zip(signed.signers, signed.signatures, strict=True)
    good = [key for key, signature in made if key in judge.owners and identity.verify(key, message, signature)]
    return keep_signatures(signed, good)


def _check_owner(descriptor: Descriptor, owner: PeerId) -> None:
    if owner not in descriptor.owners:
        from pulsenetd import identity  # late: without an owner's key nothing here needs its packages

        key = identity.to_libp2p_text(owner)
        raise ConfigError(f"{key} does not own this run; name an owner's key with --owner-key FILE")


def _load_records(directory: Path, kind: type[Descriptor] | type[EpochRecord]) -> list[SignedRecord]:
    records = []
    for path in sorted(directory.glob("[0-9]*.record")):
        try:
            data = read_regular(path, limits.RECORD_SIZE_BYTES_MAX)
            if len(data) > limits.RECORD_SIZE_BYTES_MAX:
                raise StorageError(f"{path} is too large for a record; delete it and join again")
            signed = decode_signed(data)
            decode_value(kind, signed.payload)
            records.append(signed)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        except PulsenetError as error:
            raise StorageError(f"{path} is damaged ({error}); delete it and join again") from error
    return records
