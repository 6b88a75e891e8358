"""The in-process engine: in place, all or nothing, never a mix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.codec.changes import Changes
from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    StructureError,
    UnavailableError,
)
from pulsenet.ids import Digest, Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.in_process import InProcessEngine
from pulsenet.serving.targets import Target

State = Mapping[str, torch.Tensor]
MakeFull = Callable[[State, Version], FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]


class Model(torch.nn.Module):
    """Embedding and head, tied or two memories; a norm, a buffer, a scalar."""

    def __init__(self, *, tied: bool = True, rows: int = 5) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(rows, 3, dtype=torch.bfloat16))
        self.head = self.embed if tied else torch.nn.Parameter(torch.zeros(rows, 3, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def make_state(seed: int, *, rows: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(rows, 3, generator=generator).to(torch.bfloat16)
    return {
        "embed": embed,
        "head": embed,
        "norm": torch.randn(3, generator=generator),
        "mask": torch.tensor([False, seed % 2 == 0]),
        "scale": torch.tensor(float(seed), dtype=torch.bfloat16),
    }


def same_bits(model: torch.nn.Module, state: State) -> bool:
    held = model.state_dict()
    return all(
        torch.equal(held[name].reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8))
        for name in state
    )


@pytest.fixture
def versions(make_full: MakeFull) -> list[FullUpdate]:
    return [make_full(make_state(seed), Version(0, seed)) for seed in range(4)]


@pytest.mark.parametrize("tied", [True, False])
def test_full_load_and_records_leave_the_versions_bits_in_every_copy(
    tied: bool, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-NAME-1: a tied receiver and one with two separate copies."""
    model = Model(tied=tied)
    engine = InProcessEngine(model)
    apply_update(engine, versions[0])
    assert engine.version == Version(0, 0)
    assert same_bits(model, make_state(0))
    apply_update(engine, make_records(versions[0], versions[1]))
    assert engine.version == Version(0, 1)
    assert same_bits(model, make_state(1))


def test_addresses_stay_over_twenty_updates(make_full: MakeFull, make_records: MakeRecords) -> None:
    """A-APP-2."""
    model = Model(tied=False)
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    engine = InProcessEngine(model)
    held = make_full(make_state(0), Version(0, 0))
    apply_update(engine, held)
    for number in range(1, 21):
        following = make_full(make_state(number), Version(0, number))
        apply_update(engine, make_records(held, following))
        assert same_bits(model, make_state(number))
        held = following
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses


@pytest.mark.parametrize("check_root", [True, False])
def test_an_error_half_way_leaves_the_old_version_as_a_whole(
    check_root: bool, versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-APP-1."""
    model = Model()
    engine = InProcessEngine(model, check_root=check_root)
    apply_update(engine, versions[0])
    write_bits, calls = Target.write_bits, []

    def fail_third_time(self: Target, indices: Any, bits: Any) -> None:
        calls.append(self.name)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        write_bits(self, indices, bits)

    monkeypatch.setattr(Target, "write_bits", fail_third_time)
    with pytest.raises(RuntimeError, match="out of memory"):
        apply_update(engine, make_records(versions[0], versions[1]))
    assert engine.version == Version(0, 0)
    assert same_bits(model, make_state(0))
    monkeypatch.undo()
    apply_update(engine, make_records(versions[0], versions[1]))
    assert same_bits(model, make_state(1))


def test_when_undoing_fails_too_nothing_is_served_until_a_full_load(
    versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-APP-1."""
    engine = InProcessEngine(Model())
    apply_update(engine, versions[0])

    def fail(self: Target, indices: Any, bits: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Target, "write_bits", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        apply_update(engine, make_records(versions[0], versions[1]))
    assert engine.version is None
    with pytest.raises(UnavailableError, match="wait for a full load"), engine.weights():
        pass
    with pytest.raises(PatchMismatchError, match="an unknown version"):
        apply_update(engine, make_records(versions[0], versions[1]))
    monkeypatch.undo()
    apply_update(engine, versions[1])
    with engine.weights() as version:
        assert version == Version(0, 1)


def test_an_error_during_a_full_load_leaves_nothing_to_serve(
    versions: list[FullUpdate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-APP-1."""
    engine = InProcessEngine(Model())
    apply_update(engine, versions[0])
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(engine, replace(versions[1], root=Digest(bytes(32))))
    assert engine.version is None


def test_a_result_with_another_root_is_undone(versions: list[FullUpdate], make_records: MakeRecords) -> None:
    model = Model()
    engine = InProcessEngine(model)
    apply_update(engine, versions[0])
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(engine, replace(make_records(versions[0], versions[1]), root=Digest(bytes(32))))
    assert engine.version == Version(0, 0)
    assert same_bits(model, make_state(0))


def test_weights_damaged_elsewhere_are_unknown_after_the_root_check(
    versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    model = Model()
    engine = InProcessEngine(model)
    apply_update(engine, versions[0])
    records = make_records(versions[0], versions[0])
    with torch.no_grad():
        model.norm[1] += 1
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(engine, replace(records, version=Version(0, 1)))
    assert engine.version is None


def test_a_changed_old_value_is_refused_before_any_write(versions: list[FullUpdate], make_records: MakeRecords) -> None:
    model = Model()
    engine = InProcessEngine(model)
    apply_update(engine, versions[0])
    with torch.no_grad():
        model.norm.zero_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PatchMismatchError, match="3 of 3 positions of norm do not hold the old bits"):
        apply_update(engine, make_records(versions[0], versions[1]))
    assert same_bits(model, before)
    assert engine.version == Version(0, 0)


@pytest.mark.parametrize("indices", [[15], [2**32 - 1], [3, 3], [4, 3]])
def test_bad_indices_are_refused_before_any_write(indices: list[int], versions: list[FullUpdate]) -> None:
    """A-APP-5."""
    model = Model()
    engine = InProcessEngine(model)
    apply_update(engine, versions[0])
    bits = np.zeros(len(indices), dtype=np.uint16)
    bad = Changes(0, np.array(indices, dtype=np.uint32), bits, bits)
    good = Changes(0, np.array([0], dtype=np.uint32), bits[:1], bits[:1] + np.uint16(1))
    update = RecordsUpdate(
        Version(0, 0), Version(0, 1), Digest(bytes(32)), versions[0].table, lambda: iter([good, bad])
    )
    with pytest.raises(PatchMismatchError):
        apply_update(engine, update)
    assert same_bits(model, make_state(0))
    assert engine.version == Version(0, 0)


# Qwen2.5: 151,665 tokens, 151,936 rows in the trainer, 152,064 in the engine.
@pytest.mark.parametrize(("logical", "padded", "rows"), [(5, 8, [3, 4]), (151_936, 152_064, [151_664, 151_935])])
def test_padding_rows_stay_and_logical_rows_change(
    logical: int, padded: int, rows: list[int], make_full: MakeFull, make_records: MakeRecords
) -> None:
    """A-NAME-4; the root is over the logical rows."""
    old, new = make_state(1, rows=logical), make_state(1, rows=logical)
    changed = new["embed"].clone()
    changed[rows] += 1
    new["embed"] = new["head"] = changed
    model = Model(tied=False, rows=padded)
    with torch.no_grad():
        model.embed[logical:] = 7.0
        model.head[logical:] = 9.0
    engine = InProcessEngine(model, vocabulary_size=logical)
    first, second = make_full(old, Version(0, 1)), make_full(new, Version(0, 2))
    apply_update(engine, first)
    apply_update(engine, make_records(first, second))
    assert engine.version == Version(0, 2)
    for weight, padding in ((model.embed, 7.0), (model.head, 9.0)):
        assert torch.equal(weight[:logical], changed)
        assert torch.equal(weight[logical:], torch.full((padded - logical, 3), padding, dtype=torch.bfloat16))


def test_another_logical_vocabulary_is_refused(make_full: MakeFull) -> None:
    """A-NAME-4."""
    model = Model(rows=8)
    model.config = type("Config", (), {"vocab_size": 5})()
    engine = InProcessEngine(model)
    with pytest.raises(StructureError, match=r"shape \[8, 3\] in the engine and \[6, 3\] in the version"):
        apply_update(engine, make_full(make_state(0, rows=6), Version(0, 1)))
    assert same_bits(model, Model(rows=8).state_dict())
    apply_update(engine, make_full(make_state(0), Version(0, 1)))


def test_after_deep_sleep_only_a_full_load_makes_it_ready(
    versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-APP-4."""
    engine = InProcessEngine(Model())
    apply_update(engine, versions[0])
    engine.invalidate()
    assert engine.version is None
    with pytest.raises(PatchMismatchError):
        apply_update(engine, make_records(versions[0], versions[1]))
    apply_update(engine, versions[1])
    assert engine.version == Version(0, 1)


def test_the_hook_sees_whole_weights_before_any_reader_and_its_error_undoes(
    versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    model, seen = Model(), []

    def drop_cache(version: Version) -> None:
        seen.append((version, same_bits(model, make_state(version.number))))
        if version.number == 2:
            raise RuntimeError("cache is in use")

    engine = InProcessEngine(model, on_applied=drop_cache)
    apply_update(engine, versions[0])
    apply_update(engine, make_records(versions[0], versions[1]))
    with pytest.raises(RuntimeError, match="cache is in use"):
        apply_update(engine, make_records(versions[1], versions[2]))
    assert seen == [(Version(0, 0), True), (Version(0, 1), True), (Version(0, 2), True)]
    assert engine.version == Version(0, 1)
    assert same_bits(model, make_state(1))


def test_readers_never_see_a_mix(versions: list[FullUpdate], make_records: MakeRecords) -> None:
    """A-APP-1."""
    model = Model()
    engine = InProcessEngine(model, check_root=False)
    apply_update(engine, versions[0])
    mixes: list[Version] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with engine.weights() as version:
                if not same_bits(model, make_state(version.number)):
                    mixes.append(version)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(30):
        apply_update(engine, make_records(versions[step % 2], versions[(step + 1) % 2]))
    stop.set()
    for reader in readers:
        reader.join()
    assert mixes == []


def test_staging_changes_nothing_and_waits_for_no_reader(versions: list[FullUpdate], make_records: MakeRecords) -> None:
    model = Model()
    engine = InProcessEngine(model)
    apply_update(engine, versions[0])
    with engine.weights() as version:
        engine.stage(make_records(versions[0], versions[1]))
        assert version == engine.version == Version(0, 0)
        assert same_bits(model, make_state(0))
    engine.commit()
    assert engine.version == Version(0, 1)
    assert same_bits(model, make_state(1))
    with pytest.raises(LocalProtocolError, match="nothing is staged"):
        engine.commit()


def test_what_is_staged_can_be_given_up_or_replaced(versions: list[FullUpdate], make_records: MakeRecords) -> None:
    model = Model()
    engine = InProcessEngine(model)
    engine.rollback()
    apply_update(engine, versions[0])
    engine.stage(versions[1])
    engine.rollback()
    with pytest.raises(LocalProtocolError):
        engine.commit()
    engine.stage(versions[1])
    engine.stage(make_records(versions[0], versions[2]))
    engine.commit()
    assert engine.version == Version(0, 2)
    assert same_bits(model, make_state(2))


def test_reading_back_finds_weights_that_changed_under_it(versions: list[FullUpdate]) -> None:
    model = Model()
    engine = InProcessEngine(model)
    with pytest.raises(LocalProtocolError, match="no version is held"):
        engine.read_back()
    apply_update(engine, versions[0])
    engine.read_back()
    assert engine.version == Version(0, 0)
    with torch.no_grad():
        model.norm[1] += 1
    with pytest.raises(IntegrityError, match=r"version 0\.0 have root"):
        engine.read_back()
    assert engine.version is None
