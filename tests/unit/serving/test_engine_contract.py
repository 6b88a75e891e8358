"""What every engine promises (docs/engines.md), asked of each that runs here, the document's example included."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.codec.changes import Changes
from pulsenet.errors import IntegrityError, LocalProtocolError, PatchMismatchError, StructureError
from pulsenet.ids import Digest, Version
from pulsenet.serving.engine import Engine, FullUpdate, RecordsUpdate, apply_update, read_back_update
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.in_process import InProcessEngine
from pulsenet.serving.safetensors_format import map_file, read_header
from pulsenet.serving.sglang import SglangEngine
from pulsenet.tensors.params import TensorSpec

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "engines.md"
SHAPES = {"bias": (3,), "weight": (3, 4)}
WRONG_ROOT = Digest(bytes(32))
MakeFull = Callable[[Mapping[str, torch.Tensor], Version], FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]


@dataclass
class Subject:
    """An engine and the ways around it: to what it serves from, and to damage that."""

    engine: Engine
    read: Callable[[], dict[str, bytes]]
    damage: Callable[[], None]


def in_process(directory: Path) -> Subject:
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    memory = {name: tensor.detach().view(torch.uint16) for name, tensor in model.named_parameters()}

    def damage() -> None:
        memory["bias"][1] ^= 1

    return Subject(
        InProcessEngine(model), lambda: {name: bits.numpy().tobytes() for name, bits in memory.items()}, damage
    )


def files(directory: Path) -> Subject:
    engine = FilesEngine(directory)

    def places() -> Iterator[tuple[str, memoryview]]:
        path = engine.current / "model.safetensors"
        data = memoryview(map_file(path, writable=True))
        for place in read_header(path):
            yield place.spec.name, data[place.offset_bytes : place.offset_bytes + place.spec.size_bytes]

    def damage() -> None:
        bias = dict(places())["bias"]
        bias[2] ^= 1

    return Subject(engine, lambda: {name: bytes(data) for name, data in places()}, damage)


def documented(directory: Path) -> Subject:
    (block, *_) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    program = directory.with_name("my_engine.py")
    program.write_text(block)
    engine = runpy.run_path(str(program))["MyEngine"]({name: ("BF16", shape) for name, shape in SHAPES.items()})

    def views() -> dict[str, Any]:
        _, _, table, region = engine.held
        return {spec.name: table.view(region, index) for index, spec in enumerate(table.tensors)}

    def damage() -> None:
        views()["bias"][1] ^= 1

    return Subject(engine, lambda: {name: view.tobytes() for name, view in views().items()}, damage)


def sglang(directory: Path, server: Any) -> Subject:
    """On a stand-in of its HTTP surface; damage is what its files can show, as SGLang does not give weights back."""
    companions = directory.with_name("companions")
    companions.mkdir()
    engine = SglangEngine(server.url, directory, companions=companions)

    def damage() -> None:
        data = map_file(directory / "current" / "model.safetensors", writable=True)
        data[-1] ^= 1

    return Subject(engine, lambda: dict(server.weights), damage)


@pytest.fixture(params=[in_process, files, documented, sglang], ids=lambda make: make.__name__)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    arguments = [request.getfixturevalue("sglang")] if request.param is sglang else []
    made: Subject = request.param(tmp_path / "engine", *arguments)
    yield made
    if isinstance(made.engine, FilesEngine | SglangEngine):
        made.engine.close()


@pytest.fixture
def versions(make_full: MakeFull) -> list[FullUpdate]:
    made = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        state = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}
        state["weight"][0, 0] = float("nan")
        state["weight"][0, 1] = -0.0 if number % 2 else 0.0
        made.append(make_full(state, Version(0, number)))
    return made


def content(update: FullUpdate) -> dict[str, bytes]:
    return {spec.name: update.tensor_bytes(index).tobytes() for index, spec in enumerate(update.table.tensors)}


def test_full_and_records_arrive_bit_by_bit(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-ENC-1: a NaN's payload and the sign of zero too."""
    assert subject.engine.version is None
    apply_update(subject.engine, versions[0])
    assert subject.read() == content(versions[0])
    for old, new in ((versions[0], versions[1]), (versions[1], versions[2])):
        apply_update(subject.engine, make_records(old, new))
        assert subject.engine.version == new.version
        assert subject.read() == content(new)
    subject.engine.read_back()
    assert subject.engine.version == Version(0, 2)


def test_a_staged_update_is_not_seen_and_can_be_given_up(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    engine = subject.engine
    apply_update(engine, versions[0])
    engine.stage(make_records(versions[0], versions[1]))
    assert (engine.version, subject.read()) == (Version(0, 0), content(versions[0]))
    engine.rollback()
    engine.rollback()
    with pytest.raises(LocalProtocolError, match="commit follows stage"):
        engine.commit()
    assert (engine.version, subject.read()) == (Version(0, 0), content(versions[0]))


def test_the_last_stage_counts(subject: Subject, versions: list[FullUpdate], make_records: MakeRecords) -> None:
    engine = subject.engine
    apply_update(engine, versions[0])
    engine.stage(make_records(versions[0], versions[1]))
    engine.stage(make_records(versions[0], versions[2]))
    engine.commit()
    assert (engine.version, subject.read()) == (Version(0, 2), content(versions[2]))


def test_a_refused_stage_gives_up_the_one_before(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    engine = subject.engine
    apply_update(engine, versions[0])
    engine.stage(make_records(versions[0], versions[1]))
    with pytest.raises(PatchMismatchError):
        engine.stage(make_records(versions[1], versions[2]))
    with pytest.raises(LocalProtocolError, match="commit follows stage"):
        engine.commit()


def test_a_version_without_visible_change_moves_the_version(subject: Subject, versions: list[FullUpdate]) -> None:
    """A-ENC-6."""
    full = versions[0]
    apply_update(subject.engine, full)
    same = RecordsUpdate(full.version, Version(0, 1), full.root, full.table, lambda: iter(()))
    apply_update(subject.engine, same)
    assert (subject.engine.version, subject.read()) == (Version(0, 1), content(full))


def other_base(update: RecordsUpdate) -> RecordsUpdate:
    return replace(update, base_version=Version(0, 9))


def other_bits(update: RecordsUpdate) -> RecordsUpdate:
    first, *rest = update.changes()
    wrong = Changes(first.tensor_index, first.indices, first.old_bits ^ first.old_bits.dtype.type(1), first.new_bits)
    return replace(update, changes=lambda: iter((wrong, *rest)))


def other_bits_at_the_end(update: RecordsUpdate) -> RecordsUpdate:
    *rest, last = update.changes()
    wrong = Changes(last.tensor_index, last.indices, last.old_bits ^ last.old_bits.dtype.type(1), last.new_bits)
    return replace(update, changes=lambda: iter((*rest, wrong)))


def beyond_the_end(update: RecordsUpdate) -> RecordsUpdate:
    bits = np.zeros(1, np.uint16)
    record = Changes(0, np.array([3], np.uint32), bits, bits)
    return replace(update, changes=lambda: iter((record,)))


@pytest.mark.parametrize("spoil", [other_base, other_bits, other_bits_at_the_end, beyond_the_end])
def test_records_that_do_not_fit_are_refused_before_anything_changes(
    spoil: Callable[[RecordsUpdate], RecordsUpdate],
    subject: Subject,
    versions: list[FullUpdate],
    make_records: MakeRecords,
) -> None:
    """A-APP-5."""
    apply_update(subject.engine, versions[0])
    with pytest.raises(PatchMismatchError):
        subject.engine.stage(spoil(make_records(versions[0], versions[1])))
    assert (subject.engine.version, subject.read()) == (Version(0, 0), content(versions[0]))


def test_records_are_refused_while_nothing_is_held(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    with pytest.raises(PatchMismatchError, match="ask for a full load"):
        subject.engine.stage(make_records(versions[0], versions[1]))
    assert subject.engine.version is None


# Not files: they take the tensors of each full version.
@pytest.mark.parametrize("subject", [in_process, documented], indirect=True, ids=lambda make: make.__name__)
def test_other_tensors_are_refused(subject: Subject, versions: list[FullUpdate], make_full: MakeFull) -> None:
    """A-NAME-3."""
    apply_update(subject.engine, versions[0])
    other = make_full({"bias": torch.zeros(3), "weight": torch.zeros(3, 4)}, Version(0, 1))
    assert TensorSpec("bias", "F32", (3,)) in other.table.tensors
    with pytest.raises(StructureError):
        subject.engine.stage(other)
    assert (subject.engine.version, subject.read()) == (Version(0, 0), content(versions[0]))


def test_a_result_with_another_root_leaves_the_old_version(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-APP-3."""
    apply_update(subject.engine, versions[0])
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(subject.engine, replace(make_records(versions[0], versions[1]), root=WRONG_ROOT))
    assert (subject.engine.version, subject.read()) == (Version(0, 0), content(versions[0]))
    apply_update(subject.engine, make_records(versions[0], versions[1]))
    assert (subject.engine.version, subject.read()) == (Version(0, 1), content(versions[1]))


def test_a_full_update_with_another_root_is_never_a_version(subject: Subject, versions: list[FullUpdate]) -> None:
    apply_update(subject.engine, versions[0])
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(subject.engine, replace(versions[1], root=WRONG_ROOT))
    if subject.engine.version is not None:
        assert (subject.engine.version, subject.read()) == (Version(0, 0), content(versions[0]))
    apply_update(subject.engine, versions[2])
    assert (subject.engine.version, subject.read()) == (Version(0, 2), content(versions[2]))


def test_damage_is_found_by_reading_back_and_mended_by_a_full_update(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    with pytest.raises(LocalProtocolError, match="no version is held"):
        subject.engine.read_back()
    apply_update(subject.engine, versions[0])
    subject.damage()
    with pytest.raises(IntegrityError):
        subject.engine.read_back()
    assert subject.engine.version is None
    with pytest.raises(PatchMismatchError):
        apply_update(subject.engine, make_records(versions[0], versions[1]))
    apply_update(subject.engine, versions[1])
    assert (subject.engine.version, subject.read()) == (Version(0, 1), content(versions[1]))


def test_what_an_update_wrote_is_read_back_by_sample(
    subject: Subject, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """These tensors are small enough to be samples as a whole."""
    with pytest.raises(LocalProtocolError, match="no version is held"):
        read_back_update(subject.engine)
    apply_update(subject.engine, versions[0])
    read_back_update(subject.engine)
    apply_update(subject.engine, make_records(versions[0], versions[1]))
    read_back_update(subject.engine)
    assert subject.engine.version == Version(0, 1)
    subject.damage()
    with pytest.raises(IntegrityError):
        read_back_update(subject.engine)
    assert subject.engine.version is None
    apply_update(subject.engine, versions[2])
    read_back_update(subject.engine)
    assert subject.read() == content(versions[2])


def test_nothing_of_an_update_is_needed_once_it_is_committed(subject: Subject, versions: list[FullUpdate]) -> None:
    region = versions[0].region.copy()
    apply_update(subject.engine, replace(versions[0], region=region))
    region[:] = 0
    subject.engine.read_back()
    assert subject.read() == content(versions[0])
