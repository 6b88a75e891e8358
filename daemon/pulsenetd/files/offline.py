"""``pulsenet verify`` and ``pulsenet patch``: what the swarm does between versions, done between files.

Every function returns plain values for the command line to print.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pulsenet.codec.blocks import Codec
from pulsenet.codec.changes import Changes, apply_changes
from pulsenet.codec.patch import PatchTotals, decode_patch, encode_patch, list_records
from pulsenet.errors import (
    IntegrityError,
    PatchMismatchError,
    RemoteProtocolError,
    StorageError,
    StructureError,
    UsageError,
)
from pulsenet.ids import Digest, short
from pulsenet.serving.engine import describe_names
from pulsenet.serving.safetensors_format import TensorPlace, copy_companions, map_file, name_refusal, sync_path
from pulsenet.tensors.params import ParameterTable
from pulsenetd.files.patch_files import PatchFile, PatchFileHeader, damaged, open_patch, read_pieces, write_patch
from pulsenetd.files.safetensors_files import INDEX_NAME, OnProgress, TensorFiles, open_model

FP32_HINT = (
    "most weights are FP32, where nearly every value changes at every step: compare BF16 checkpoints to see what "
    "pulsenet would send"
)


def verify(path: Path, on_progress: OnProgress = lambda done, total: None) -> dict[str, Any]:
    """Return the root of a safetensors file or directory and what it holds.

    Args:
        path: File or directory.
        on_progress: Told how many bytes of how many were hashed.

    Raises:
        UsageError: No model is there.
        StorageError: It is damaged.
    """
    model = open_model(path)
    dtypes = Counter[str]()
    for spec in model.table.tensors:
        dtypes[spec.dtype] += spec.element_count
    return {
        "path": str(path),
        "root": model.compute_root(on_progress).hex(),
        "file_count": len(model.files),
        "tensor_count": len(model.table.tensors),
        "element_count": model.table.element_count,
        "size_bytes": model.table.size_bytes,
        "elements_by_dtype": dict(dtypes),
    }


def patch_make(
    old: Path, new: Path, output: Path, *, codec: str = "auto", on_progress: OnProgress = lambda done, total: None
) -> dict[str, Any]:
    """Write the patch that turns the model ``old`` into ``new``, and return what it saves.

    Both may be files or directories, sharded or not. Temporary space for both is needed where ``output`` goes.

    Raises:
        UsageError: A model is missing, or ``output`` cannot be a file.
        StructureError: The models do not hold the same tensors.
        StorageError: A file is damaged, or the disk is full.
    """
    old_model, new_model = open_model(old), open_model(new)
    _refuse_input(output, (*old_model.files, *new_model.files))
    table = new_model.table
    check_same_tensors(f"{old} and {new}", old_model.table, table)
    with _output_file(output) as partial, ThreadPoolExecutor(os.cpu_count()) as threads:
        size_bytes = table.size_bytes
        old_region, base_root = old_model.copy_to_region(
            output.parent, lambda done, _: on_progress(done, 2 * size_bytes)
        )
        new_region, root = new_model.copy_to_region(
            output.parent, lambda done, _: on_progress(size_bytes + done, 2 * size_bytes)
        )
        totals = PatchTotals()
        hasher = blake3()
        with tempfile.TemporaryFile(dir=output.parent) as blob, partial.open("wb") as file:
            pieces = encode_patch(table, old_region, new_region, codec=codec, totals=totals, run_blocks=threads.map)
            for piece in pieces:
                blob.write(piece)
                hasher.update(piece)
            blob.seek(0)
            header = PatchFileHeader(
                table=table.encode(),
                base_root=base_root,
                root=root,
                codec_id=totals.codec_id,
                changed_count=totals.changed_count,
                blob_size_bytes=totals.encoded_size_bytes,
                blob_digest=Digest(hasher.digest()),
            )
            write_patch(file, header, read_pieces(blob))
    return patch_show(output)


def patch_apply(
    base: Path, patch: Path, output: Path, on_progress: OnProgress = lambda done, total: None
) -> dict[str, Any]:
    """Write the model that ``patch`` makes of ``base``: a file of a file, a directory of a directory.

    The base's root is checked before anything is written and the result's root before it gets its name. Files keep
    the base's layout and metadata; configuration and tokenizer of a directory are copied.

    Raises:
        UsageError: Something is missing, or ``output`` is in the way.
        PatchMismatchError: ``base`` is not the patch's base.
        IntegrityError: The result does not have the root the patch promises.
        StorageError: A file is damaged, or the disk is full.
    """
    opened = open_patch(patch)
    _refuse_input(output, (patch,))
    model = open_model(base)
    check_same_tensors(f"{base} and {patch}", model.table, opened.table)
    make_output = _output_directory if base.is_dir() else _output_file
    with make_output(output) as partial:
        region, base_root = model.copy_to_region(output.parent, on_progress)
        if base_root != opened.header.base_root:
            raise PatchMismatchError(
                f"{base} has root {short(base_root)}, but {patch} starts from {short(opened.header.base_root)}: "
                "give the model it was made from"
            )
        copies = _copy_files(model, partial)
        _apply_blob(opened, model, region, copies)
        root = TensorFiles(list(copies.values()), _moved(model, copies)).compute_root()
        if root != opened.header.root:
            raise IntegrityError(
                f"the result has root {short(root)}, but {patch} promises {short(opened.header.root)}: make it again"
            )
    return {
        "output": str(output),
        "base_root": base_root.hex(),
        "root": root.hex(),
        "changed_count": opened.header.changed_count,
        "element_count": model.table.element_count,
        "size_bytes": model.table.size_bytes,
    }


def patch_show(patch: Path) -> dict[str, Any]:
    """Return what a patch file holds and what it saves.

    Raises:
        UsageError: It is not there or is no patch file.
        StorageError: It is damaged.
    """
    opened = open_patch(patch)
    header, table = opened.header, opened.table
    blocks_by_codec, changes_by_tensor = Counter[str](), Counter[str]()
    try:
        for record in list_records(opened.read_blob(), table):
            blocks_by_codec[Codec(record.codec_id).name.lower()] += 1
            changes_by_tensor[record.block.spec.name] += record.changed_count
    except RemoteProtocolError as error:
        raise damaged(patch, str(error)) from error
    changed_count = changes_by_tensor.total()
    result: dict[str, Any] = {
        "file": str(patch),
        "base_root": header.base_root.hex(),
        "root": header.root.hex(),
        "tensor_count": len(table.tensors),
        "changed_tensor_count": len(changes_by_tensor),
        "element_count": table.element_count,
        "changed_count": changed_count,
        "density_ratio": changed_count / table.element_count if table.element_count else 0.0,
        "dense_size_bytes": table.size_bytes,
        "patch_size_bytes": header.blob_size_bytes,
        "file_size_bytes": opened.size_bytes,
        "compression_ratio": table.size_bytes / header.blob_size_bytes,
        "bits_per_change": header.blob_size_bytes * 8 / changed_count if changed_count else 0.0,
        "blocks_by_codec": dict(blocks_by_codec),
        "most_changed_tensors": dict(changes_by_tensor.most_common(5)),
    }
    if 2 * sum(spec.element_count for spec in table.tensors if spec.dtype == "F32") > table.element_count:
        result["hint"] = FP32_HINT
    return result


def check_same_tensors(what: str, first: ParameterTable, second: ParameterTable) -> None:
    """Refuse two models that do not hold tensors of the same names, dtypes and shapes."""
    first_specs = {spec.name: spec for spec in first.tensors}
    second_specs = {spec.name: spec for spec in second.tensors}
    names = sorted(first_specs.keys() | second_specs.keys())
    wrong = [name for name in names if first_specs.get(name) != second_specs.get(name)]
    if wrong:
        raise StructureError(
            f"{what} differ in name, dtype or shape of {describe_names(wrong)} tensors: "
            "a patch needs two versions of one model"
        )


def _copy_files(model: TensorFiles, partial: Path) -> dict[Path, Path]:
    """Copy the base's files to where the result grows; return each file's copy."""
    if not partial.is_dir():
        shutil.copyfile(model.files[0], partial)
        return {model.files[0]: partial}
    source = model.files[0].parent
    copy_companions(source, partial)
    if (source / INDEX_NAME).is_file():
        shutil.copyfile(source / INDEX_NAME, partial / INDEX_NAME)
    copies = {file: partial / file.name for file in model.files}
    for file, copy in copies.items():
        shutil.copyfile(file, copy)
    return copies


def _moved(model: TensorFiles, copies: dict[Path, Path]) -> dict[str, TensorPlace]:
    """Return where the model's tensors lie in the copies of its files."""
    return {
        place.spec.name: TensorPlace(path=copies[place.path], spec=place.spec, offset_bytes=place.offset_bytes)
        for place in model.places
    }


def _apply_blob(opened: PatchFile, model: TensorFiles, region: npt.NDArray[np.uint8], copies: dict[Path, Path]) -> None:
    """Decode the blob against the base in ``region`` and write its changes into the copies."""
    maps = {file: map_file(copy, writable=True) for file, copy in copies.items()}
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for changes in decode_patch(opened.read_blob(), opened.table, region, run_blocks=threads.map):
                place = model.places[changes.tensor_index]
                _apply_at(maps[place.path], place, changes)
    except RemoteProtocolError as error:
        raise damaged(opened.path, str(error)) from error
    for mapping in maps.values():
        mapping.flush()


def _apply_at(mapping: mmap, place: TensorPlace, changes: Changes) -> None:
    """Write changes into one tensor of a mapped file."""
    spec = place.spec
    view = np.frombuffer(mapping, dtype=spec.bits_dtype, count=spec.element_count, offset=place.offset_bytes)
    if view.flags.aligned:
        apply_changes(view, changes)
        return
    # A file may start its tensors at odd bytes, which compiled loops do not take.
    copy = view.copy()
    apply_changes(copy, changes)
    view[:] = copy


def _refuse_input(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that would take the place of what it is made from."""
    if any(output.exists() and output.samefile(file) for file in inputs):
        raise UsageError(f"{output} is one of the inputs: name another file for the output")


@contextmanager
def _output_file(output: Path) -> Iterator[Path]:
    """Yield the name of a file beside ``output`` that takes its place, durable, when the block succeeds."""
    if output.is_dir():
        raise UsageError(f"{output} is a directory: name a file for the output")
    if output.exists() and not output.is_file():
        # A device or pipe would not be written to but replaced, /dev/null for every program of this machine.
        raise UsageError(f"{output} is no regular file: name a file for the output")
    with _renamed(output) as partial:
        yield partial


@contextmanager
def _output_directory(output: Path) -> Iterator[Path]:
    """Yield a directory beside ``output`` that gets its name, durable, when the block succeeds."""
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} already exists: name a directory that does not")
    with _renamed(output) as partial:
        partial.mkdir()
        yield partial


@contextmanager
def _renamed(output: Path) -> Iterator[Path]:
    """Give what the block writes at the yielded path the name ``output``, or remove it if the block fails."""
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent} is no directory: make it first")
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        yield partial
        for file in partial.iterdir() if partial.is_dir() else ():
            sync_path(file)
        sync_path(partial)
        partial.replace(output)
        sync_path(output.parent)
    except OSError as error:
        reason = name_refusal(error)
        hint = "; free some space" if reason == "enospc" else ""
        raise StorageError(f"cannot write {output}: {error.strerror or error}{hint}", reason) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # which leaves a file
        with suppress(OSError):
            partial.unlink(missing_ok=True)
