"""Serves from a model in this process: weights change in place, addresses stay, readers never see a mix.

Read under the guard::

    with engine.weights() as version:
        output = model.generate(…)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from pulsenet.codec.changes import Changes
from pulsenet.errors import LocalProtocolError, PatchMismatchError, UnavailableError
from pulsenet.ids import Digest, Version
from pulsenet.serving.engine import (
    EngineUpdate,
    FullUpdate,
    RecordsUpdate,
    check_base,
    check_records,
    check_root,
    require_staged,
)
from pulsenet.serving.samples import Sample, check_samples, take_samples
from pulsenet.serving.targets import Target, compute_model_root, find_targets
from pulsenet.serving.weights_lock import WeightsLock
from pulsenet.tensors.params import ParameterTable


class InProcessEngine:
    """An :class:`pulsenet.Engine` over a ``torch.nn.Module``, such as a transformers model.

    Args:
        model: Its tensors must have the names, dtypes and shapes of the published ones, wrapper prefixes apart.
        vocabulary_size: Rows of embedding and head that are real where this model pads them; ``None`` takes
            ``model.config.vocab_size`` if there is one. Padding rows are never touched.
        on_applied: Called with the new version when the weights are whole and before any reader sees them: the place
            to drop prefix caches. If it raises, the update is undone.
        check_root: Hash all weights after every update, not only after a full load. Costs one pass over them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        vocabulary_size: int | None = None,
        on_applied: Callable[[Version], None] | None = None,
        check_root: bool = True,
    ) -> None:
        self._model = model
        self._vocabulary_size = vocabulary_size or _configured_vocabulary_size(model)
        self._on_applied = on_applied
        self._check_root = check_root
        self._lock = WeightsLock()
        self._version: Version | None = None
        self._root: Digest | None = None
        """Root of ``version``."""
        self._table: ParameterTable | None = None
        self._staged: _Staged | None = None
        self._samples: list[Sample] = []
        """Of the last update."""

    @property
    def version(self) -> Version | None:
        """The version the weights are, bit by bit; ``None`` until a full load succeeded."""
        return self._version

    @property
    def version_root(self) -> Digest | None:
        """The root of that version."""
        return None if self._version is None else self._root

    @contextmanager
    def weights(self) -> Iterator[Version]:
        """Keep the weights as they are until the block ends, and say which version they are.

        Raises:
            UnavailableError: They are no known version: nothing was loaded, or an update failed and could not be
                undone.
        """
        with self._lock.reading():
            if self._version is None:
                raise UnavailableError("the weights are no known version yet: wait for a full load")
            yield self._version

    def invalidate(self) -> None:
        """Say that the weights are no longer known, as after a deep sleep: only a full load makes them ready again."""
        with self._lock.writing():
            self._version = None

    def stage(self, update: EngineUpdate) -> None:
        """Find where every tensor goes and check every record; see :meth:`Engine.stage`."""
        self._staged = None
        if isinstance(update, RecordsUpdate):
            check_base(self._version, update)
            check_records(update.changes(), update.table)
        with torch.inference_mode():
            targets = find_targets(self._model, update.table, vocabulary_size=self._vocabulary_size)
            if isinstance(update, RecordsUpdate):
                for changes in update.changes():
                    for target in targets[changes.tensor_index]:
                        _check_old_bits(target, changes)
        self._staged = _Staged(update, targets, take_samples(update))

    def commit(self) -> None:
        """Write in place while no reader is inside; see :meth:`Engine.commit`.

        An error puts the old bits of a records update back. If that fails too, or if the update was a full one,
        ``version`` is ``None`` and readers are refused until a full update was committed.
        """
        staged = require_staged(self._staged)
        update = staged.update
        with torch.inference_mode(), self._lock.writing():
            if isinstance(update, RecordsUpdate):
                check_base(self._version, update)
            self._version = None
            try:
                staged.write()
                if self._check_root or isinstance(update, FullUpdate):
                    check_root(update.version, update.root, compute_model_root(staged.targets, update.table))
                if self._on_applied is not None:
                    self._on_applied(update.version)
            except BaseException:
                self._undo(staged)
                raise
            self._version, self._root, self._table = update.version, update.root, update.table
            self._samples = staged.samples
            self._staged = None

    def rollback(self) -> None:
        """Give up what is staged; a commit that failed has undone itself."""
        self._staged = None

    def read_back(self) -> None:
        """Hash all weights; see :meth:`Engine.read_back`."""
        with torch.inference_mode(), self._lock.writing():
            if self._version is None or self._table is None or self._root is None:
                raise LocalProtocolError("no version is held: there is nothing to read back")
            version, self._version = self._version, None
            targets = find_targets(self._model, self._table, vocabulary_size=self._vocabulary_size)
            check_root(version, self._root, compute_model_root(targets, self._table))
            self._version = version

    def read_back_sample(self) -> None:
        """Compare a sample of the last update with the model, beside its readers; see :meth:`Engine.read_back`."""
        # Readers are not in the way, and one that generates for a minute would be in ours.
        with torch.inference_mode(), self._lock.reading():
            version, table = self._version, self._table
            if version is None or table is None:
                raise LocalProtocolError("no version is held: there is nothing to read back")
            try:
                targets = find_targets(self._model, table, vocabulary_size=self._vocabulary_size)
                check_samples(version, self._samples, partial(_count_other_bits, targets))
            except BaseException:
                self._version = None
                raise

    def _undo(self, staged: _Staged) -> None:
        """Put the old bits back everywhere, however far the writes came, and say the base is held if that is true."""
        self._staged = None
        update = staged.update
        if isinstance(update, FullUpdate):
            return
        for changes in update.changes():
            for target in staged.targets[changes.tensor_index]:
                target.write_bits(changes.indices, changes.old_bits)
        # Without a root check the old bits, compared before the first write, are what we know.
        if not self._check_root or compute_model_root(staged.targets, update.table) == self._root:
            self._version = update.base_version


@dataclass(slots=True)
class _Staged:
    """An update and where its tensors go."""

    update: EngineUpdate
    targets: list[tuple[Target, ...]]
    samples: list[Sample]
    """What is read back after the commit, chosen while nobody waits."""

    def write(self) -> None:
        """Overwrite what the update changes."""
        if isinstance(self.update, RecordsUpdate):
            for changes in self.update.changes():
                for target in self.targets[changes.tensor_index]:
                    target.write_bits(changes.indices, changes.new_bits)
            return
        for tensor_index, copies in enumerate(self.targets):
            for target in copies:
                target.write_bytes(self.update.tensor_bytes(tensor_index))


def _count_other_bits(targets: Sequence[tuple[Target, ...]], sample: Sample) -> int:
    """Return how many positions of a sample any copy of its tensor holds otherwise."""
    return sum(target.count_other_bits(sample.indices, sample.bits) for target in targets[sample.tensor_index])


def _check_old_bits(target: Target, changes: Changes) -> None:
    """Refuse records that start from other bits than the model holds."""
    wrong_count = target.count_other_bits(changes.indices, changes.old_bits)
    if wrong_count:
        raise PatchMismatchError(
            f"{wrong_count} of {len(changes)} positions of {target.name} do not hold the old bits: ask for a full load"
        )


def _configured_vocabulary_size(model: torch.nn.Module) -> int | None:
    """Return what a transformers model's configuration says, if it has one."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None
