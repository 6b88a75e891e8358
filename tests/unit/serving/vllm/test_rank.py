"""One rank's weights through every phase: in place, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pulsenet.codec.changes import Changes, encode_changes
from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    RemoteProtocolError,
    StorageError,
    StructureError,
)
from pulsenet.ids import Version, compute_digest
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.serving.vllm.attest import Checkpoint
from pulsenet.serving.vllm.exchange import Order, State, UpdateInfo
from pulsenet.serving.vllm.map import Memory
from pulsenet.serving.vllm.rank import SAMPLE_COUNT_MAX, RankWeights, Sample, map_memory
from pulsenet.tensors.params import TensorSpec, make_table

Published = Callable[..., dict[str, torch.Tensor]]
MakeFull = Callable[..., FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]


class Bench:
    """A rank, a place for shared memory, and the versions it is brought through."""

    def __init__(self, path: Path, model: Any, versions: Sequence[FullUpdate], states: Sequence[Any]) -> None:
        self.model, self.versions, self.memory = model, versions, path / "memory"
        checkpoint = path / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        save_file({name: tensor.clone() for name, tensor in states[0].items()}, checkpoint / "model.safetensors")
        model.load_weights(states[0].items())
        self.checkpoint = checkpoint
        self.weights = RankWeights(model)

    def attach(self) -> None:
        table = self.versions[0].table
        self.weights.attach(self.weights.draw(table), lambda table: Checkpoint(self.checkpoint, table))

    def stage_full(self, update: FullUpdate) -> None:
        self.memory.write_bytes(update.region.tobytes())
        self.weights.stage(
            UpdateInfo(
                Order.STAGE, "t", "", str(update.version), "", root=update.root.hex(), size_bytes=update.region.size
            ),
            self.memory,
        )

    def stage_records(self, update: RecordsUpdate, *, data: bytes | None = None, digest: str | None = None) -> None:
        data = b"".join(encode_changes(changes) for changes in update.changes()) if data is None else data
        self.memory.write_bytes(data)
        self.weights.stage(
            UpdateInfo(
                Order.STAGE,
                "t",
                "",
                str(update.version),
                str(update.base_version),
                root=update.root.hex(),
                size_bytes=len(data),
                digest=compute_digest(data).hex() if digest is None else digest,
            ),
            self.memory,
        )

    def bring(self, update: FullUpdate | RecordsUpdate) -> None:
        if isinstance(update, FullUpdate):
            self.stage_full(update)
        else:
            self.stage_records(update)
        self.weights.commit()
        self.weights.finish()


@pytest.fixture(params=[(0, 1), (1, 2)], ids=["whole", "shard"])
def place(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def states(make_published: Published) -> list[dict[str, torch.Tensor]]:
    return [make_published(seed) for seed in range(3)]


@pytest.fixture
def versions(states: list[Any], make_full: MakeFull) -> list[FullUpdate]:
    return [make_full(state, Version(0, number)) for number, state in enumerate(states)]


@pytest.fixture
def bench(tmp_path: Path, served_model: Any, versions: Any, states: Any, place: tuple[int, int]) -> Bench:
    bench = Bench(tmp_path, served_model(*place), versions, states)
    bench.attach()
    return bench


@pytest.fixture
def is_held(bench: Bench, states: Any, place: tuple[int, int], get_bits: Any, fresh_bits: Any) -> Callable[[int], bool]:
    return lambda number: bool(get_bits(bench.model) == fresh_bits(states[number], *place))


def test_versions_follow_each_other_in_place(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, is_held: Callable[[int], bool]
) -> None:
    """A-APP-2: bits equal a fresh engine's, addresses stay."""
    addresses = {name: tensor.data_ptr() for name, tensor in bench.model.state_dict().items()}
    assert (bench.weights.state, bench.weights.held) == (State.READY, None)
    assert bench.weights.root == versions[0].root.hex()
    bench.bring(versions[0])
    assert bench.weights.held == Version(0, 0)
    assert is_held(0)
    for before, after in ((0, 1), (1, 2), (2, 0), (0, 1)):
        bench.bring(make_records(versions[before], versions[after]))
        assert bench.weights.held == versions[after].version
        assert bench.weights.root == versions[after].root.hex()
        assert is_held(after)
    bench.bring(versions[2])
    assert is_held(2)
    assert {name: tensor.data_ptr() for name, tensor in bench.model.state_dict().items()} == addresses


def test_staging_writes_nothing_and_says_how_much_it_will(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, is_held: Callable[[int], bool]
) -> None:
    bench.stage_full(versions[0])
    assert bench.weights.changed_count == 0  # the checkpoint is that version
    bench.weights.commit()
    bench.weights.finish()
    bench.stage_records(make_records(versions[0], versions[1]))
    assert bench.weights.state is State.STAGED
    assert bench.weights.changed_count > 0
    assert is_held(0)
    bench.weights.rollback()
    assert (bench.weights.state, bench.weights.changed_count) == (State.READY, 0)
    bench.stage_full(versions[1])
    assert bench.weights.changed_count > 100
    bench.weights.rollback()
    assert bench.weights.held == Version(0, 0)
    with pytest.raises(LocalProtocolError, match="nothing is staged"):
        bench.weights.commit()
    with pytest.raises(LocalProtocolError, match="nothing is committed"):
        bench.weights.finish()


def test_a_committed_update_is_undone_to_the_bit(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, is_held: Callable[[int], bool]
) -> None:
    """A-APP-1."""
    bench.bring(versions[0])
    bench.stage_records(make_records(versions[0], versions[1]))
    bench.weights.commit()
    assert bench.weights.state is State.COMMITTED
    assert is_held(1)
    with pytest.raises(LocalProtocolError, match="roll it back first"):
        bench.stage_records(make_records(versions[0], versions[2]))
    with pytest.raises(LocalProtocolError, match="nothing is staged"):
        bench.weights.commit()
    bench.attach()  # a node that came back; what undoes the commit is kept
    assert bench.weights.state is State.COMMITTED
    bench.weights.rollback()
    assert is_held(0)
    assert (bench.weights.state, bench.weights.held) == (State.READY, Version(0, 0))
    bench.weights.rollback()
    assert bench.weights.held == Version(0, 0)


def test_a_full_update_that_is_not_finished_leaves_nothing_known(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, is_held: Callable[[int], bool]
) -> None:
    bench.bring(versions[0])
    bench.stage_full(versions[1])
    bench.weights.commit()
    bench.weights.rollback()
    assert (bench.weights.state, bench.weights.held, bench.weights.root) == (State.UNKNOWN, None, None)
    with pytest.raises(PatchMismatchError, match="an unknown version"):
        bench.stage_records(make_records(versions[0], versions[1]))
    bench.attach()
    assert bench.weights.state is State.UNKNOWN
    bench.bring(versions[2])
    assert bench.weights.held == Version(0, 2)
    assert is_held(2)


def test_an_error_in_the_middle_of_writing_is_undone(
    bench: Bench,
    versions: list[FullUpdate],
    make_records: MakeRecords,
    is_held: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A-APP-1."""
    bench.bring(versions[0])
    bench.stage_records(make_records(versions[0], versions[1]))
    scatter, calls = torch.Tensor.scatter_, []

    def fail_third_time(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return scatter(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "scatter_", fail_third_time)
    with pytest.raises(RuntimeError, match="device lost"):
        bench.weights.commit()
    bench.weights.rollback()
    monkeypatch.undo()
    assert is_held(0)
    assert bench.weights.held == Version(0, 0)


def test_writes_that_do_not_arrive_are_read_back(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.bring(versions[0])
    bench.stage_records(make_records(versions[0], versions[1]))
    monkeypatch.setattr(torch.Tensor, "scatter_", lambda self, *arguments: self)
    with pytest.raises(IntegrityError, match="read back do not hold what was written"):
        bench.weights.commit()
    bench.weights.rollback()
    assert bench.weights.held == Version(0, 0)


def test_old_bits_that_do_not_come_back_leave_nothing_known(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.bring(versions[0])
    bench.stage_records(make_records(versions[0], versions[1]))
    bench.weights.commit()
    monkeypatch.setattr(torch.Tensor, "scatter_", lambda self, *arguments: self)
    with pytest.raises(IntegrityError, match="did not come back"):
        bench.weights.rollback()
    assert bench.weights.state is State.UNKNOWN


def test_a_sample_is_spread_over_what_was_written() -> None:
    count = 3 * SAMPLE_COUNT_MAX
    memory = Memory("w", torch.zeros(count, dtype=torch.int16))
    sample = Sample.take(memory, torch.arange(count), memory.bits)
    sample.check()
    memory.bits[3 * 1000 + 1] = 1
    sample.check()
    memory.bits[3 * 1000] = 1
    with pytest.raises(IntegrityError, match=f"1 of {SAMPLE_COUNT_MAX} positions of w"):
        sample.check()


def bad(table: Any, name: str, indices: list[int], *, width: int = 2) -> bytes:
    bits = np.zeros(len(indices), dtype=f"<u{width}")
    tensor_index = table.index_of(name) if name else 999
    return encode_changes(Changes(tensor_index, np.array(indices, dtype=np.uint32), bits, bits))


@pytest.mark.parametrize(
    ("name", "indices", "width"),
    [("q", [64], 2), ("q", [2**32 - 1], 2), ("q", [3, 3], 2), ("q", [4, 3], 2), ("q", [0], 4), ("", [0], 2)],
)
def test_bad_records_are_refused_before_any_write(
    name: str,
    indices: list[int],
    width: int,
    bench: Bench,
    versions: list[FullUpdate],
    make_records: MakeRecords,
    is_held: Callable[[int], bool],
) -> None:
    """A-APP-5: outside, -1 as it wraps, twice, unsorted, another width, an unknown tensor."""
    bench.bring(versions[0])
    good = make_records(versions[0], versions[1])
    data = b"".join(encode_changes(changes) for changes in good.changes())
    with pytest.raises(RemoteProtocolError):
        bench.stage_records(good, data=data + bad(versions[0].table, name, indices, width=width))
    assert bench.weights.state is State.READY
    assert is_held(0)


def test_a_record_given_twice_is_refused(bench: Bench, versions: list[FullUpdate], make_records: MakeRecords) -> None:
    bench.bring(versions[0])
    good = make_records(versions[0], versions[1])
    data = b"".join(encode_changes(changes) for changes in good.changes())
    with pytest.raises(RemoteProtocolError, match=r"repeat or go back|after"):
        bench.stage_records(good, data=data + data)


def test_wrong_digest_base_replay_and_old_bits_are_refused(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords, is_held: Callable[[int], bool]
) -> None:
    """A-CHAIN-5, A-APP-4: after a deep sleep the old bits are gone."""
    bench.bring(versions[0])
    first, second = make_records(versions[0], versions[1]), make_records(versions[1], versions[2])
    with pytest.raises(IntegrityError, match="do not have their digest"):
        bench.stage_records(first, digest="00")
    with pytest.raises(PatchMismatchError, match=r"lead from 0\.1 to 0\.2, but this rank holds 0\.0"):
        bench.stage_records(second)
    bench.bring(first)
    with pytest.raises(PatchMismatchError, match=r"this rank holds 0\.1"):
        bench.stage_records(first)
    with torch.no_grad():
        bench.model.conv.zero_()
    with pytest.raises(PatchMismatchError, match="positions of conv do not hold the old bits"):
        bench.stage_records(second)


def test_damaged_orders_and_memory_are_refused(bench: Bench, versions: list[FullUpdate]) -> None:
    memory = bench.memory
    with pytest.raises(StorageError, match="cannot be opened") as caught:
        bench.weights.stage(UpdateInfo(Order.STAGE, "t", "", "0.1", size_bytes=8), memory)
    assert caught.value.reason == "unreadable"
    memory.write_bytes(bytes(8))
    with pytest.raises(StorageError, match="has 8 bytes, 9 were announced"):
        map_memory(memory, 9)
    with pytest.raises(StorageError, match="8 bytes for"):
        bench.weights.stage(UpdateInfo(Order.STAGE, "t", "", "0.1", size_bytes=8), memory)
    with pytest.raises(StorageError, match="'latest' is no version"):
        bench.weights.stage(UpdateInfo(Order.STAGE, "t", "", "latest", size_bytes=8), memory)
    assert map_memory(memory, 0).size == 0


def test_a_patch_without_changes_changes_the_version_alone(
    bench: Bench, versions: list[FullUpdate], is_held: Callable[[int], bool]
) -> None:
    """A-ENC-6."""
    bench.bring(versions[0])
    update = versions[0]
    bench.stage_records(RecordsUpdate(Version(0, 0), Version(0, 1), update.root, update.table, lambda: iter(())))
    assert bench.weights.changed_count == 0
    bench.weights.commit()
    bench.weights.finish()
    assert bench.weights.held == Version(0, 1)
    assert is_held(0)


def test_parameters_that_moved_are_refused(bench: Bench, versions: list[FullUpdate], make_records: MakeRecords) -> None:
    """A-APP-2."""
    bench.bring(versions[0])
    bench.stage_records(make_records(versions[0], versions[1]))
    bench.model.conv.data = bench.model.conv.data.clone()
    with pytest.raises(IntegrityError, match="moved its parameters"):
        bench.weights.commit()


@pytest.mark.parametrize("is_full", [True, False])
def test_reading_back_finds_weights_that_changed_since(
    is_full: bool, bench: Bench, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    bench.weights.read_back()
    bench.bring(versions[1])
    if not is_full:
        bench.bring(make_records(versions[1], versions[2]))
    bench.weights.read_back()
    assert bench.weights.state is State.READY
    bench.stage_full(versions[0])
    bench.weights.commit()
    with pytest.raises(LocalProtocolError, match="not finished"):
        bench.weights.read_back()
    with pytest.raises(LocalProtocolError, match="not finished"):
        bench.weights.compare(Checkpoint(bench.checkpoint, bench.weights.map.table), "it")
    bench.weights.finish()
    with torch.no_grad():
        bench.model.norm += 1
    with pytest.raises(IntegrityError, match="positions of norm read back"):
        bench.weights.read_back()
    assert (bench.weights.state, bench.weights.held) == (State.UNKNOWN, None)


def test_an_update_that_writes_nothing_keeps_what_is_read_back(
    bench: Bench, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    bench.bring(versions[0])
    bench.bring(make_records(versions[0], versions[1]))
    update = versions[1]
    bench.bring(RecordsUpdate(Version(0, 1), Version(0, 2), update.root, update.table, lambda: iter(())))
    with torch.no_grad():
        bench.model.norm += 1
    with pytest.raises(IntegrityError, match="positions of norm read back"):
        bench.weights.read_back()


def test_weights_that_are_doubted_are_compared_and_written_only_if_they_differ(
    bench: Bench, versions: list[FullUpdate], is_held: Callable[[int], bool]
) -> None:
    bench.bring(versions[1])
    bench.stage_full(versions[2])
    bench.weights.commit()
    with pytest.raises(LocalProtocolError, match="not finished"):
        bench.weights.doubt()
    bench.weights.finish()
    bench.weights.doubt()
    assert (bench.weights.state, bench.weights.held, bench.weights.root) == (State.UNKNOWN, None, None)
    bench.stage_full(versions[2])
    assert bench.weights.changed_count == 0
    bench.weights.commit()
    bench.weights.finish()
    assert (bench.weights.state, bench.weights.held) == (State.READY, Version(0, 2))
    bench.weights.doubt()
    bench.stage_full(versions[1])
    assert bench.weights.changed_count > 0
    bench.weights.commit()
    bench.weights.finish()
    assert is_held(1)


def test_a_checkpoint_that_differs_is_refused_and_nothing_is_attached(
    tmp_path: Path, served_model: Any, versions: list[FullUpdate], states: list[Any]
) -> None:
    bench = Bench(tmp_path, served_model(), versions, states)
    with pytest.raises(LocalProtocolError, match="not attached"):
        bench.stage_full(versions[1])
    with torch.no_grad():
        bench.model.conv[0, 0] += 1
    with pytest.raises(StructureError, match=r"other bits than its checkpoint .*; it packs or computes"):
        bench.attach()
    assert bench.weights.state is State.NEW
    with pytest.raises(LocalProtocolError, match="not attached"):
        _ = bench.weights.map


def test_other_tensors_later_ask_for_a_new_engine(bench: Bench, versions: list[FullUpdate]) -> None:
    bench.bring(versions[1])
    bench.attach()
    assert bench.weights.held == Version(0, 1)
    other = make_table([TensorSpec("norm", "F32", (8,))])
    with pytest.raises(StructureError, match="start the engine again"):
        bench.weights.attach(bench.weights.draw(other), lambda table: Checkpoint(bench.checkpoint, table))


def test_parameters_that_moved_are_no_version_when_they_are_attached_again(
    bench: Bench, versions: list[FullUpdate], is_held: Callable[[int], bool]
) -> None:
    """Somebody let the engine load other weights into new memory while no node was there."""
    bench.bring(versions[1])
    bench.model.norm.data = torch.zeros_like(bench.model.norm)
    bench.attach()
    assert (bench.weights.state, bench.weights.held) == (State.UNKNOWN, None)
    bench.bring(versions[1])
    assert bench.weights.held == Version(0, 1)
    assert is_held(1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_subset_of_changes_equals_loading_it_afresh(
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
    served_model: Any,
    make_published: Published,
    make_full: MakeFull,
    make_records: MakeRecords,
    get_bits: Any,
    fresh_bits: Any,
) -> None:
    """Bits over all ranks equal a fresh engine's, NaN and -0.0 included, and rolling back restores the old ones."""
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    old, new = make_published(7), make_published(7)
    for name, tensor in new.items():
        if name == "head":
            continue
        flat = tensor.view(-1).view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
        for index in data.draw(st.lists(st.integers(0, flat.numel() - 1), max_size=4)):
            flat[index] = data.draw(st.sampled_from([0x7FC1, -0x8000, 0x0001, 0x7F80, -1, 5]))
    new["head"] = new["embed"]
    versions = [make_full(old, Version(0, 1)), make_full(new, Version(0, 2))]
    for rank in range(ranks):
        bench = Bench(tmp_path_factory.mktemp("rank"), served_model(rank, ranks), versions, [old])
        bench.attach()
        bench.bring(versions[0])
        bench.stage_records(make_records(versions[0], versions[1]))
        bench.weights.commit()
        assert get_bits(bench.model) == fresh_bits(new, rank, ranks)
        bench.weights.rollback()
        assert get_bits(bench.model) == fresh_bits(old, rank, ranks)
