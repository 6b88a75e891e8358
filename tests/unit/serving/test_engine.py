"""What is checked about records before an engine writes."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenet.codec.changes import Changes
from pulsenet.errors import IntegrityError, LocalProtocolError, PatchMismatchError
from pulsenet.ids import Digest, Version
from pulsenet.serving.engine import (
    EngineUpdate,
    FullUpdate,
    RecordsUpdate,
    apply_update,
    check_base,
    check_records,
    check_root,
    describe_names,
    require_staged,
)
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "F32", (3,)), TensorSpec("c", "BF16", (0,))])


def change(tensor_index: int, indices: list[int], *, width: int = 2) -> Changes:
    bits = np.arange(len(indices)).astype(f"u{width}")
    return Changes(tensor_index, np.array(indices, dtype=np.uint32), bits, bits + bits.dtype.type(1))


def test_records_that_fit_are_counted() -> None:
    records = [change(0, [0, 1]), change(0, [3]), change(1, [], width=4), change(1, [2], width=4)]
    assert check_records(records, TABLE) == 4


def test_no_records_are_no_changes() -> None:
    """A-ENC-6."""
    assert check_records([], TABLE) == 0


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([change(0, [0, 4])], "reach index 4, but it has 4 elements"),
        ([change(0, [2**32 - 1])], "reach index 4294967295"),
        ([change(0, [1, 1])], "repeat or go back"),
        ([change(0, [2, 1])], "repeat or go back"),
        ([change(0, [1]), change(0, [1])], "repeat or go back"),
        ([change(1, [0], width=4), change(0, [0])], "tensor 0 after 1"),
        ([change(3, [0])], "tensor 3 after 0, of 3"),
        ([change(1, [0], width=2)], "hold uint16, but it has F32"),
        ([change(2, [0])], "reach index 0, but it has 0 elements"),
    ],
)
def test_records_that_do_not_fit_are_refused(records: list[Changes], reason: str) -> None:
    """A-APP-5: an index beyond the end, -1 as it wraps, twice, unsorted, of another width."""
    with pytest.raises(PatchMismatchError, match=reason):
        check_records(records, TABLE)


@pytest.mark.parametrize("held", [None, Version(0, 6)])
def test_records_from_another_version_are_refused(held: Version | None) -> None:
    update = RecordsUpdate(Version(0, 7), Version(0, 8), Digest(bytes(32)), TABLE, lambda: iter(()))
    with pytest.raises(PatchMismatchError, match=r"lead from 0\.7 to 0\.8"):
        check_base(held, update)
    check_base(Version(0, 7), update)


def test_another_root_is_refused() -> None:
    check_root(Version(0, 1), Digest(b"a" * 32), Digest(b"a" * 32))
    with pytest.raises(IntegrityError, match=r"version 0\.1 have root 62626262, expected 61616161"):
        check_root(Version(0, 1), Digest(b"a" * 32), Digest(b"b" * 32))


def test_a_full_update_gives_each_tensor_its_bytes_without_padding() -> None:
    region = np.arange(TABLE.layout_size_bytes, dtype=np.uint8)
    update = FullUpdate(Version(0, 1), Digest(bytes(32)), TABLE, region)
    assert [update.tensor_bytes(index).tolist() for index in range(3)] == [list(range(8)), list(range(64, 76)), []]


def test_names_are_described_by_count_and_the_first_five() -> None:
    """A-NAME-3."""
    assert describe_names(iter("ab")) == "2 (a, b)"
    assert describe_names("abcdefg") == "7 (a, b, c, d, e, …)"


class Recorder:
    """Writes down what it is asked, and fails where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.version: Version | None = None
        self.asked: list[str] = []
        self._fails_at = fails_at

    def stage(self, update: EngineUpdate) -> None:
        self._note("stage")

    def commit(self) -> None:
        self._note("commit")

    def rollback(self) -> None:
        self._note("rollback")

    def read_back(self) -> None:
        self._note("read_back")

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what == self._fails_at:
            raise IntegrityError(what)


@pytest.mark.parametrize(
    ("fails_at", "asked"),
    [("", ["stage", "commit"]), ("stage", ["stage", "rollback"]), ("commit", ["stage", "commit", "rollback"])],
)
def test_an_update_is_staged_then_committed_and_given_up_after_an_error(fails_at: str, asked: list[str]) -> None:
    """A-APP-3."""
    engine = Recorder(fails_at)
    update = FullUpdate(Version(0, 1), Digest(bytes(32)), TABLE, np.zeros(TABLE.layout_size_bytes, np.uint8))
    if fails_at:
        with pytest.raises(IntegrityError, match=fails_at):
            apply_update(engine, update)
    else:
        apply_update(engine, update)
    assert engine.asked == asked


def test_commit_before_stage_is_the_callers_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="commit follows stage"):
        require_staged(None)
    assert require_staged(7) == 7
