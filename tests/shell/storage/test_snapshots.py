"""Spooling what an encoder makes, checked against the part it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.codec.changes import Changes
from pulsenet.errors import IntegrityError
from pulsenetd.snapshots import CheckedSpool, Snapshot
from pulsenetd.storage.spools import SpoolDirectory


def changes_of(model: Any, index: int, count: int) -> Changes:
    new = model.table.view(model.bytes, index)[:count].copy()
    return Changes(index, np.arange(count, dtype=np.uint32), new ^ 1, new)


def test_right_changes_are_spooled_in_order(kit: Any, tmp_path: Path) -> None:
    model = kit.Model()
    with CheckedSpool(SpoolDirectory(tmp_path), model.table) as spooling:
        expected = []
        for part in model.parts().take():
            spooling.part = part
            (index,) = part.tensor_indices
            count = min(3, model.table.tensors[index].element_count)
            if count:
                expected.append(changes_of(model, index, count))
                spooling.take(expected[-1])
        spool = spooling.finish()
    assert spool is not None
    assert list(spool.read_blocks()) == expected
    assert spool.path.exists()
    snapshot = Snapshot(model.parts(), spool=spool)
    snapshot.close()
    assert not list(tmp_path.iterdir())


def test_changes_that_are_not_the_parts_are_refused_and_nothing_stays(kit: Any, tmp_path: Path) -> None:
    model = kit.Model()
    parts = model.parts().take()
    with CheckedSpool(SpoolDirectory(tmp_path), model.table) as spooling:
        spooling.part = next(parts)
        wrong = changes_of(model, 0, 3)
        wrong.new_bits[2] ^= 4
        with pytest.raises(IntegrityError, match=r"model\.embed\.weight"):
            spooling.take(wrong)
    assert not list(tmp_path.iterdir())


def test_too_many_changes_are_not_kept(kit: Any, tmp_path: Path) -> None:
    model = kit.Model()
    count = model.table.tensors[0].element_count
    parts = model.parts().take()
    with CheckedSpool(SpoolDirectory(tmp_path), model.table) as spooling:
        spooling.part = next(parts)
        for _ in range(2):
            spooling.take(changes_of(model, 0, count))
        assert spooling.finish() is None
    assert not list(tmp_path.iterdir())
