"""What is compared after each update: few positions, spread over all that was written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from pulsenet.errors import IntegrityError
from pulsenet.ids import Version
from pulsenet.serving import samples as samples_module
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.serving.samples import POSITIONS_PER_TENSOR_MAX, Sample, check_samples, take_samples

MakeFull = Callable[[Mapping[str, torch.Tensor], Version], FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]


@pytest.fixture
def pair(make_full: MakeFull) -> tuple[FullUpdate, FullUpdate]:
    old = {"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.float32)}
    new = {**old, "a": torch.arange(1000).to(torch.bfloat16)}
    return make_full(old, Version(0, 0)), make_full(new, Version(0, 1))


def test_a_full_update_is_sampled_in_every_tensor(pair: tuple[FullUpdate, FullUpdate]) -> None:
    first, second = take_samples(pair[1])
    assert (first.tensor_index, second.tensor_index) == (0, 1)
    assert len(first.indices) == 250 <= POSITIONS_PER_TENSOR_MAX
    assert (int(first.indices[1]), int(first.indices[-1])) == (4, 996)
    assert np.array_equal(first.bits, pair[1].tensor_bytes(0).view(np.uint16)[first.indices])
    assert (second.indices.tolist(), second.bits.tolist()) == ([0], [0])


def test_records_are_sampled_where_they_write(
    pair: tuple[FullUpdate, FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "POSITIONS_PER_TENSOR_MAX", 3)
    (sample,) = take_samples(make_records(*pair))
    assert (sample.tensor_index, sample.indices.tolist()) == (0, [1, 334, 667])
    assert np.array_equal(sample.bits, pair[1].tensor_bytes(0).view(np.uint16)[[1, 334, 667]])


def test_a_version_without_visible_change_has_no_samples(pair: tuple[FullUpdate, FullUpdate]) -> None:
    full = pair[0]
    assert take_samples(RecordsUpdate(full.version, Version(0, 1), full.root, full.table, lambda: iter(()))) == []


def test_other_bits_are_counted() -> None:
    samples = [Sample(index, np.arange(4), np.zeros(4, np.uint16)) for index in range(2)]
    check_samples(Version(0, 7), samples, lambda sample: 0)
    with pytest.raises(IntegrityError, match=r"3 of 8 positions read back .* version 0\.7 wrote"):
        check_samples(Version(0, 7), samples, lambda sample: 3 * sample.tensor_index)
