"""What the node and the workers of an engine tell each other: orders over HTTP, answers as files.

A worker must not raise inside vLLM's collective calls: the answers of the other ranks would stay queued, and the next
call would return the old error. So every rank writes its answer to a file of its own, whole, and the node reads them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import PulsenetError, StorageError
from pulsenet.ids import Version
from pulsenet.serving.safetensors_format import name_refusal

ANSWER_SIZE_BYTES_MAX: Final = 64 << 20
"""An answer lists a rank's windows: some 100 bytes each, a few per tensor."""

TABLE_NAME: Final = "table"
MEMORY_NAME: Final = "memory"
LOCK_NAME: Final = "owner.lock"
PAUSED_NAME: Final = "paused"
"""Exists while the engine is paused by the node: whoever finds it after the node died may resume."""


class Order(StrEnum):
    """What the node asks of every rank."""

    ATTACH = "attach"
    """Draw the map and compare the weights with the checkpoint."""
    STAGE = "stage"
    """Read and check an update, and hold it ready."""
    COMMIT = "commit"
    """Write it, keeping what it overwrites, and read it back."""
    ROLLBACK = "rollback"
    """Give up what is staged; put back what a commit overwrote."""
    FINISH = "finish"
    """Let go of what a commit overwrote: it is the new version."""
    READ_BACK = "read_back"
    """Compare a sample of what was written last with what is there."""
    COMPARE = "compare"
    """Compare all weights with a model directory, while the engine serves; nothing changes."""
    DOUBT = "doubt"
    """Believe nothing of the weights until they were compared or written as a whole: sleep may have dropped them."""
    SURVEY = "survey"
    """Draw the map, and find which tensors lie as published: of an engine that is loaded instead of patched."""
    LOOK = "look"
    """Draw the map anew, and compare those tensors with a model directory."""
    WATCHDOG = "watchdog"
    """Nobody asked: the node was gone in the middle of an update."""


class State(StrEnum):
    """How one rank's weights are."""

    NEW = "new"
    """Nothing was attached: no map, no version."""
    READY = "ready"
    """The weights are those of ``held``, or of the checkpoint if that is ``None``."""
    STAGED = "staged"
    """As READY, with an update held ready."""
    COMMITTED = "committed"
    """An update is written and can be rolled back."""
    UNKNOWN = "unknown"
    """The weights are no version; only a full update helps."""


class Outcome(StrEnum):
    """How an order ended."""

    DONE = "done"
    REFUSED = "refused"
    """The order cannot be carried out; nothing was changed."""
    FAILED = "failed"
    """An error in the middle; ``state`` says what is left."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank says after an order."""

    rank: int
    world_size: int
    boot: str
    """Drawn by the worker when it starts: another one means that the engine was started again."""
    transaction: str
    order: Order
    outcome: Outcome
    state: State
    is_open: bool
    """vLLM holds a weight update open: it refuses to start another."""
    held: str | None = None
    """Version of the weights, as text; ``None`` if they are the checkpoint's or unknown."""
    root: str | None = None
    """Root of ``held`` or of the checkpoint, hexadecimal."""
    code: str = ""
    """Stable reason of an order that was not done."""
    reason: str = ""
    """The same for people: cause and next step."""
    changed_count: int = 0
    """Positions of this rank that the update writes; after SURVEY, elements that lie as published."""
    seconds: float = 0.0
    windows: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...] = ()
    """After ATTACH: (tensor index, source offset, sizes, source strides) of all that this rank holds."""


def encode_answer(answer: Answer) -> bytes:
    """Return an answer as JSON."""
    return json.dumps(dataclasses.asdict(answer)).encode()


def decode_answer(data: bytes) -> Answer:
    """Return the answer that ``data`` encodes.

    Raises:
        StorageError: It is damaged or of another release.
    """
    try:
        raw = json.loads(data)
        names = {field.name for field in dataclasses.fields(Answer)}
        if not isinstance(raw, dict) or set(raw) != names:
            raise ValueError("other fields")
        raw |= {"order": Order(raw["order"]), "outcome": Outcome(raw["outcome"]), "state": State(raw["state"])}
        raw["windows"] = tuple(
            (int(index), int(offset), tuple(map(int, sizes)), tuple(map(int, strides)))
            for index, offset, sizes, strides in raw["windows"]
        )
        numbers = (raw["rank"], raw["world_size"], raw["changed_count"])
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"numbers {numbers}")
        return Answer(**raw)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StorageError(
            f"an answer of the engine is damaged ({error}): start the engine again", "damaged"
        ) from error


def answer_path(directory: Path, rank: int) -> Path:
    """Return where a rank writes its answers."""
    return directory / f"rank-{rank}.json"


def write_answer(directory: Path, answer: Answer) -> None:
    """Put a rank's answer in place of its last one; a reader sees one or the other, whole."""
    write_whole(answer_path(directory, answer.rank), encode_answer(answer))


def read_answer(directory: Path, rank: int) -> Answer | None:
    """Return a rank's last answer; ``None`` if there is none, or one that cannot be read."""
    try:
        with answer_path(directory, rank).open("rb") as file:
            if os.fstat(file.fileno()).st_size > ANSWER_SIZE_BYTES_MAX:
                return None
            return decode_answer(file.read())
    except (OSError, PulsenetError):
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file that appears as a whole.

    Raises:
        StorageError: The disk refused.
    """
    partial = path.with_name(f".partial-{path.name}-{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise describe_refusal(f"{path} cannot be written", error) from error


def remove(path: Path) -> None:
    """Remove a small file, if it is there.

    Raises:
        StorageError: The disk refused.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise describe_refusal(f"{path} cannot be removed", error) from error


def describe_refusal(what: str, error: OSError) -> StorageError:
    """Return the error that says what the disk refused, and why."""
    return StorageError(f"{what}: {error.strerror}", name_refusal(error))


def check_private(directory: Path) -> None:
    """Refuse a directory that another user could have put there or may write to.

    Raises:
        StorageError: The message says what is wrong with it.
    """
    try:
        found = os.stat(directory, follow_symlinks=False)
    except OSError as error:
        raise StorageError(f"{directory} cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{directory} is no directory")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise StorageError(
            f"{directory} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}: it must be the engine's "
            "own and closed to others; run node and engine as one user"
        )


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """An order as it travels; small, because weights travel by shared memory."""

    order: Order
    transaction: str
    directory: str
    version: str = ""
    base_version: str = ""
    """Empty for a full update."""
    root: str = ""
    size_bytes: int = 0
    digest: str = ""
    """BLAKE3 of the records, hexadecimal; empty for a full update, which the node checks by its root."""
    engine_url: str = ""
    """With ATTACH: where a watchdog may resume the engine."""
    checkpoint: str = ""
    """Directory to compare with: with ATTACH, if it is not the engine's own model; with COMPARE, always."""

    def to_json(self) -> dict[str, Any]:
        """Return the order as plain values."""
        return {**dataclasses.asdict(self), "order": str(self.order)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> UpdateInfo:
        """Return the order that plain values describe.

        Raises:
            StorageError: They are no order of this release.
        """
        try:
            values = dict(raw)
            if any(
                type(values[field.name]) is not (int if field.name == "size_bytes" else str)
                for field in dataclasses.fields(cls)
                if field.name in values
            ):
                raise ValueError("a value of another type")
            values["order"] = Order(values["order"])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"an order of the node is damaged ({error}): give node and engine one release of pulsenet", "damaged"
            ) from error


def parse_version(text: str) -> Version | None:
    """Return the version that ``0.57`` means; ``None`` for anything else."""
    epoch, _, number = text.partition(".")
    if not (epoch.isascii() and epoch.isdigit() and number.isascii() and number.isdigit()):
        return None
    return Version(int(epoch), int(number))
