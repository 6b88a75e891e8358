"""Keeps a safetensors directory current for whoever reads files: a whole new version, then one rename.

::

    directory/current -> versions/0.58
    directory/versions/0.57/…
    directory/versions/0.58/model.safetensors
    directory/versions/0.58/pulsenet.json        {"version": "0.58", "root": "…", "aliases": {…}}

A reader that resolves ``current`` once and opens files below the result never sees two versions; the version before
stays, so that a reader in the middle of it can finish.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.changes import apply_changes
from pulsenet.errors import IntegrityError, LocalProtocolError, PulsenetError, StorageError, StructureError
from pulsenet.ids import Digest, Version
from pulsenet.serving.engine import (
    EngineUpdate,
    FullUpdate,
    RecordsUpdate,
    check_base,
    check_records,
    check_root,
    describe_names,
    require_staged,
)
from pulsenet.serving.safetensors_format import (
    MARKER_NAME,
    TensorPlace,
    copy_companions,
    file_order,
    map_file,
    name_refusal,
    read_header,
    sync_path,
    write_safetensors,
)
from pulsenet.serving.samples import Sample, check_samples, take_samples
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable, make_table

VERSIONS_KEPT: Final = 2
"""The current version and the one before: a reader that opened it can finish."""

WEIGHTS_NAME: Final = "model.safetensors"
MARKER_SIZE_BYTES_MAX: Final = 16 << 20
PARTIAL_PREFIX: Final = ".partial-"
LOCK_NAME: Final = ".lock"


class FilesEngine:
    """An :class:`pulsenet.Engine` whose weights are files. One process may write a directory.

    Args:
        directory: Where versions appear; made if it is missing. What an earlier process left is taken over if it is
            whole: its root is checked, and half-written versions are removed.
        companions: A model directory whose other files (configuration, tokenizer) are copied beside every version,
            so that ``directory/current`` loads as a model.

    Raises:
        StorageError: The directory cannot be used.
    """

    def __init__(self, directory: Path | str, *, companions: Path | str | None = None) -> None:
        self.directory = directory = Path(directory)
        self._companions = None if companions is None else Path(companions)
        self._versions = directory / "versions"
        self._version: Version | None = None
        self._root: Digest | None = None
        """Of ``version``."""
        self._staged: _Staged | None = None
        self._samples: list[Sample] = []
        self._table: ParameterTable | None = None
        """Both of the last update; none of what an earlier process left, which is hashed as a whole."""
        with _storage_errors(directory):
            self._versions.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_directory(directory)
            for left in self._versions.glob(f"{PARTIAL_PREFIX}*"):
                shutil.rmtree(left)
            self._version = self._recover()

    def close(self) -> None:
        """Let another process take the directory over; the files stay."""
        self.rollback()
        self._lock.close()

    @property
    def version(self) -> Version | None:
        """The version ``current`` leads to; ``None`` before the first load or if its files are damaged."""
        return self._version

    @property
    def version_root(self) -> Digest | None:
        """The root of that version."""
        return None if self._version is None else self._root

    @property
    def current(self) -> Path:
        """The link to the newest whole version."""
        return self.directory / "current"

    def stage(self, update: EngineUpdate) -> None:
        """Write the whole new version beside the current one and check its root; errors also ``StorageError``."""
        self.rollback()
        fill = self._fill_records(update) if isinstance(update, RecordsUpdate) else partial(_fill_full, update)
        with _storage_errors(self.directory):
            place = self._versions / f"{PARTIAL_PREFIX}{update.version}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            try:
                fill(place)
                check_root(update.version, update.root, compute_file_root(place / WEIGHTS_NAME, update.table))
                if self._companions is not None:
                    copy_companions(self._companions, place)
                _write_marker(place / MARKER_NAME, update.version, update.root, update.table)
                for file in place.iterdir():
                    sync_path(file)
                sync_path(place)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
        self._staged = _Staged(place, update.version, update.root, take_samples(update), update.table)

    def commit(self) -> None:
        """Lead ``current`` to the staged version; errors also ``StorageError``, and then the old version stays."""
        staged = require_staged(self._staged)
        with _storage_errors(self.directory):
            try:
                final = self._free_name(staged.version)
                staged.place.rename(final)
            except BaseException:
                self.rollback()
                raise
            self._staged = None
            sync_path(self._versions)
            self._switch(final)
            self._version, self._root = staged.version, staged.root
            self._samples, self._table = staged.samples, staged.table
            self._prune(final)

    def rollback(self) -> None:
        """Remove the staged version's files; see :meth:`Engine.rollback`."""
        staged, self._staged = self._staged, None
        if staged is not None:
            shutil.rmtree(staged.place, ignore_errors=True)

    def read_back(self) -> None:
        """Hash the files that ``current`` leads to; see :meth:`Engine.read_back`."""
        if self._version is None:
            raise LocalProtocolError("no version is held: there is nothing to read back")
        held, self._version = self._version, None
        with _storage_errors(self.directory):
            self._version = self._recover()
        if self._version != held:
            self._version = None
            raise IntegrityError(f"the files in {self.current} are no longer version {held}: load them in full")

    def read_back_sample(self) -> None:
        """Compare a sample of the last update with the files; see :meth:`Engine.read_back`."""
        held = self._version
        if held is None:
            raise LocalProtocolError("no version is held: there is nothing to read back")
        table = self._table
        if table is None:
            return
        try:
            with _storage_errors(self.directory):
                path = self.current / WEIGHTS_NAME
                places = {place.spec.name: place for place in read_header(path)}
                _check_same_tensors(table, places)
                mapping = map_file(path)

            def count_other_bits(sample: Sample) -> int:
                view = _view_place(mapping, places[table.tensors[sample.tensor_index].name])
                return int(np.count_nonzero(view[sample.indices] != sample.bits))

            check_samples(held, self._samples, count_other_bits)
        except BaseException:
            self._version = None
            raise

    def _fill_records(self, update: RecordsUpdate) -> Callable[[Path], None]:
        """Check records against the current files, and return what writes their result into a directory."""
        check_base(self._version, update)
        changed_count = check_records(update.changes(), update.table)
        old = self.current.resolve() / WEIGHTS_NAME
        places = {place.spec.name: place for place in read_header(old)}
        _check_same_tensors(update.table, places)

        def fill(directory: Path) -> None:
            if changed_count == 0:
                try:
                    os.link(old, directory / WEIGHTS_NAME)  # no file is ever written twice, so both versions may be one
                except OSError:  # not every file system can
                    shutil.copyfile(old, directory / WEIGHTS_NAME)
                return
            shutil.copyfile(old, directory / WEIGHTS_NAME)
            mapping = map_file(directory / WEIGHTS_NAME, writable=True)
            for changes in update.changes():
                spec = update.table.tensors[changes.tensor_index]
                apply_changes(_view_place(mapping, places[spec.name]), changes)
            mapping.flush()

        return fill

    def _switch(self, final: Path) -> None:
        """Lead ``current`` to a version in one step that readers see before or after, never in between."""
        link = self.directory / f"{PARTIAL_PREFIX}current"
        link.unlink(missing_ok=True)
        link.symlink_to(final.relative_to(self.directory), target_is_directory=True)
        link.replace(self.current)
        sync_path(self.directory)

    def _free_name(self, version: Version) -> Path:
        """Return a name for the version's directory, removing one of that name that no reader is led to."""
        # Resolved on both sides: the directory may be named by a link, or from where this process is.
        led_to = self.current.resolve()
        final = self._versions / str(version)
        if final.resolve() == led_to:
            final = self._versions / f"{version}-repaired"
            if final.resolve() == led_to:
                final = self._versions / str(version)
        if final.exists():
            shutil.rmtree(final)
        return final

    def _prune(self, current: Path) -> None:
        """Remove all but the newest versions; the current one stays whatever the clock says."""
        others = [path for path in self._versions.iterdir() if path != current and path.is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in others[VERSIONS_KEPT - 1 :]:
            shutil.rmtree(path)

    def _recover(self) -> Version | None:
        """Return the version that an earlier process left whole, hashing it first."""
        marker = self.current / MARKER_NAME
        if not marker.is_file() or marker.stat().st_size > MARKER_SIZE_BYTES_MAX:
            return None
        try:
            match json.loads(marker.read_bytes()):
                case {"version": str(text), "root": str(root)}:
                    epoch, number = text.split(".")
                    version = Version(int(epoch), int(number))
                    places = read_header(self.current / WEIGHTS_NAME)
                    table = make_table([place.spec for place in places])
                    self._root = Digest(bytes.fromhex(root))
                    check_root(version, self._root, compute_file_root(places[0].path, table))
                    return version
        except (ValueError, IndexError, PulsenetError):
            # Damaged or half-removed by hand: not an error, the next update is a full one.
            return None
        return None


@dataclass(frozen=True, slots=True)
class _Staged:
    """A whole version that nobody is led to yet."""

    place: Path
    version: Version
    root: Digest
    samples: list[Sample]
    table: ParameterTable


def _fill_full(update: FullUpdate, directory: Path) -> None:
    """Write every tensor of an update into a directory."""
    specs = file_order(update.table.tensors)
    indices = {spec.name: index for index, spec in enumerate(update.table.tensors)}
    tensors = (update.tensor_bytes(indices[spec.name]).data for spec in specs)
    write_safetensors(directory / WEIGHTS_NAME, specs, tensors, {"format": "pt"})


def compute_file_root(path: Path, table: ParameterTable) -> Digest:
    """Hash the tensors of one safetensors file that holds exactly those of ``table``."""
    places = {place.spec.name: place for place in read_header(path)}
    _check_same_tensors(table, places)
    mapping = map_file(path)
    return compute_root(table, [hash_tensor(_view_place(mapping, places[spec.name])) for spec in table.tensors])


def _check_same_tensors(table: ParameterTable, places: Mapping[str, TensorPlace]) -> None:
    """Refuse a file that does not hold exactly the tensors of ``table``."""
    wrong = [spec.name for spec in table.tensors if spec.name not in places or places[spec.name].spec != spec]
    wrong += sorted(set(places) - {spec.name for spec in table.tensors})
    if wrong:
        raise StructureError(
            f"the files and the version differ in {describe_names(wrong)} tensors: ask for a full load"
        )


def _view_place(mapping: mmap.mmap, place: TensorPlace) -> npt.NDArray[Any]:
    """Return one tensor of a mapped file as flat bits."""
    spec = place.spec
    if spec.size_bytes == 0:
        return np.empty(0, dtype=spec.bits_dtype)
    return np.frombuffer(mapping, dtype=spec.bits_dtype, count=spec.element_count, offset=place.offset_bytes)


def _write_marker(path: Path, version: Version, root: Digest, table: ParameterTable) -> None:
    """Say in one small file what the directory holds."""
    marker = {"version": str(version), "root": root.hex(), "aliases": dict(table.aliases)}
    path.write_text(json.dumps(marker, indent=1) + "\n")


def _lock_directory(directory: Path) -> BinaryIO:
    """Take the directory for this process until the returned file is closed or the process ends."""
    lock = (directory / LOCK_NAME).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise StorageError(f"another process keeps {directory} current: choose another directory", "locked") from error
    return lock


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    """Turn what the system refuses into one line that names the directory."""
    try:
        yield
    except OSError as error:
        # It may be another file, such as a companion.
        place = "" if error.filename is None else f": {error.filename}"
        text = f"cannot keep a model in {directory}: {error.strerror or error}{place}"
        raise StorageError(text, name_refusal(error)) from error
