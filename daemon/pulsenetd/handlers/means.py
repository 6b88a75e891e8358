"""Effects of mixing that are arithmetic: checking parts, making means, checking the means of others.

The vectors are blobs in the store; they are read and written block by block in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from pulsenet.codec.patch import RunBlocks
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Effect
from pulsenet.node.mixing.effects import CheckMean, CombineParts, CompareProbes
from pulsenet.node.mixing.events import CombineFailed, MeanChecked, PartsCombined, PartSlice, ProbesCompared
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.payload import (
    NO_BASE,
    JobTable,
    MixingHeader,
    PartContent,
    combine_parts,
    inspect_part,
    make_job_table,
)
from pulsenet.outer.mixing.probe import compare_answers
from pulsenet.outer.mixing.settings import Job, MixingSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.sections import BlobCutter
from pulsenetd.driver import Handler, Post
from pulsenetd.logs import logger
from pulsenetd.storage.store import Store

NO_TABLE = "table"
"""No training process ever said what it trains: nothing can be combined."""


class MixingMeans:
    """Executes the arithmetic of mixing.

    Args:
        store: Where the blobs are.
        settings: Of the run.
        peer_id: This node's key: the own part was looked into when it was made.
        find_masters: Returns the table of masters, once a training process told it.
        threads: Where blobs are read and written.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.
    """

    def __init__(
        self,
        store: Store,
        settings: MixingSettings,
        peer_id: PeerId,
        find_masters: Callable[[], ParameterTable | None],
        *,
        threads: Executor,
        run_blocks: RunBlocks = map,
    ) -> None:
        self._store = store
        self._settings = settings
        self._peer_id = peer_id
        self._find_masters = find_masters
        self._threads = threads
        self._run_blocks = run_blocks

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            CombineParts: self._combine_parts,
            CheckMean: self._check_mean,
            CompareProbes: self._compare_probes,
        }

    async def _combine_parts(self, effect: CombineParts, post: Post) -> None:
        post(await asyncio.get_running_loop().run_in_executor(self._threads, self.combine, effect))

    async def _check_mean(self, effect: CheckMean, post: Post) -> None:
        post(await asyncio.get_running_loop().run_in_executor(self._threads, self.check, effect))

    async def _compare_probes(self, effect: CompareProbes, post: Post) -> None:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, compare_answers, effect.answers, effect.round_index
        )
        post(ProbesCompared(effect.number, found.distance))

    def combine(self, effect: CombineParts) -> PartsCombined | CombineFailed:
        """Check the parts of others and store the mean of all; blocks."""
        found = self._header_of(effect, 1)
        if found is None:
            return CombineFailed(effect.number, NO_TABLE)
        job_table, header = found
        bad = []
        try:
            for part in effect.parts:
                if part.peer_id != self._peer_id and (reason := self._find_fault(part.part, job_table, header)):
                    bad.append((part.peer_id, reason))
            if bad:
                return CombineFailed(effect.number, "refused", tuple(bad))
            blob_id, size_bytes = self._write(effect, job_table, header)
            content = self._inspect(blob_id, job_table, replace(header, contributor_count=len(effect.parts)))
        except StorageError as error:
            logger.warning("a mean of round %d could not be made: %s", effect.round_index, error)
            return CombineFailed(effect.number, error.reason)
        except (LocalProtocolError, RemoteProtocolError) as error:
            logger.warning("a mean of round %d could not be made: %s", effect.round_index, error)
            return CombineFailed(effect.number, "decode")
        if content.reason:
            return CombineFailed(effect.number, content.reason)
        return PartsCombined(effect.number, blob_id, size_bytes, fp32_to_bits(content.norm))

    def check(self, effect: CheckMean) -> MeanChecked:
        """Look into a mean that another member made; blocks."""
        found = self._header_of(effect, effect.contributor_count)
        if found is None:
            return MeanChecked(effect.number, NO_TABLE)
        try:
            return MeanChecked(effect.number, self._find_fault(effect.mean, *found))
        except StorageError as error:
            return MeanChecked(effect.number, error.reason)

    def _header_of(
        self, effect: CombineParts | CheckMean, contributor_count: int
    ) -> tuple[JobTable, MixingHeader] | None:
        masters = self._find_masters()
        if masters is None:
            return None
        subset = effect.subset or tuple(range(len(masters.tensors)))
        try:
            job_table = make_job_table(
                masters, self._settings, effect.job, round_index=effect.round_index, subset=subset
            )
        except LocalProtocolError as error:
            # The roster's subset comes from a coordinator that may train other tensors.
            logger.warning(
                "%s of round %d mixes tensors that this node has not: %s", effect.job.name, effect.round_index, error
            )
            return None
        if job_table is None:
            return None
        is_relative = effect.job is Job.MIX1 and bool(job_table.gated)
        base_root = effect.mixed_root if is_relative and effect.mixed_root is not None else NO_BASE
        header = MixingHeader(
            job_table.digest,
            effect.job,
            effect.round_index,
            base_root,
            effect.slice_index,
            effect.slice_count,
            contributor_count,
        )
        return job_table, header

    def _find_fault(self, part: PartSlice, job_table: JobTable, header: MixingHeader) -> str:
        """Return why a blob may not be taken, empty if it may.

        Raises:
            StorageError: it cannot be read.
        """
        content = self._inspect(part.blob_id, job_table, header)
        if content.reason:
            return content.reason
        return "" if fp32_to_bits(content.norm) == part.norm_bits else "norm"

    def _inspect(self, blob_id: Digest, job_table: JobTable, header: MixingHeader) -> PartContent:
        pieces = self._store.read_blob(blob_id)
        return inspect_part(pieces, job_table, header=header, norm_max=self._settings.norm_max)

    def _write(self, effect: CombineParts, job_table: JobTable, header: MixingHeader) -> tuple[Digest, int]:
        parts = {bytes(part.peer_id): self._store.read_blob(part.part.blob_id) for part in effect.parts}
        self._store.require_space(sum(part.part.encoded_size_bytes for part in effect.parts) // len(effect.parts))
        with self._store.writing_blob(BlobCutter()) as writer:
            for piece in combine_parts(parts, job_table, header=header, run_blocks=self._run_blocks):
                writer.feed(piece)
            chunk_list = writer.finish()
        self._store.keep_blob(chunk_list.blob_id)
        return chunk_list.blob_id, chunk_list.size_bytes
