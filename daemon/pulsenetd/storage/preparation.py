"""Decoding a patch while it arrives: a thread follows the chunks and fills a spool; the mirror is only read."""

from __future__ import annotations

import threading

from pulsenet.chain.records import Kind, Manifest
from pulsenet.codec.patch import RunBlocks, decode_patch
from pulsenet.errors import PulsenetError, UnavailableError
from pulsenetd.storage.rebuild import HeldVersion, Weights
from pulsenetd.storage.spools import Spool, SpoolDirectory
from pulsenetd.storage.store import Store

BATCH_BLOCKS_MAX = 16
"""Few blocks at a time: what came is decoded before the next chunk, and little is left to do after the last."""


def can_prepare(manifest: Manifest, held: HeldVersion) -> bool:
    """Say whether a hop is a patch from exactly these weights."""
    base = (manifest.base_version, manifest.base_root, manifest.table_digest)
    return manifest.kind is not Kind.ANCHOR and base == (held.version, held.root, held.table_digest)


class Preparation:
    """One patch on its way into a spool. End it by :meth:`finish` or :meth:`cancel`, before the weights change.

    Args:
        manifest: The patch; its chunk list is stored.
        weights: Its base; must not change meanwhile.
        store: Where the chunks appear.
        spools: Where the spool goes.
        run_blocks: ``map``, or an executor's ``map``.
    """

    def __init__(
        self, manifest: Manifest, weights: Weights, store: Store, spools: SpoolDirectory, run_blocks: RunBlocks
    ) -> None:
        assert can_prepare(manifest, weights.held)
        self.manifest = manifest
        self._weights = weights
        self._store = store
        self._spools = spools
        self._run_blocks = run_blocks
        self._is_last_call = False
        self._is_cancelled = False
        self._spool: Spool | None = None
        self._thread = threading.Thread(target=self._run, name="prepare-hop", daemon=True)
        self._thread.start()

    def finish(self) -> Spool | None:
        """Return the spool of the whole patch, all of whose chunks are stored; ``None`` if it could not be made.

        Why not is left to whoever decodes the patch again.
        """
        self._end()
        return self._spool

    def cancel(self) -> None:
        """Stop, and delete what was made."""
        self._is_cancelled = True
        self._end()
        if self._spool is not None:
            self._spool.remove()

    def _end(self) -> None:
        self._is_last_call = True
        self._store.wake_readers()
        self._thread.join()

    def _run(self) -> None:
        table, region = self._weights.table, self._weights.region.bytes
        try:
            writer = self._spools.begin(table)
        except PulsenetError:
            return
        try:
            pieces = self._store.read_arriving_blob(self.manifest.blob_id, lambda: self._is_last_call)
            for changes in decode_patch(
                pieces, table, region, run_blocks=self._run_blocks, batch_blocks_max=BATCH_BLOCKS_MAX
            ):
                if self._is_cancelled:
                    raise UnavailableError("cancelled")
                writer.write(changes)
            self._spool = writer.finish()
        except PulsenetError:
            writer.abandon()
        except BaseException:
            writer.abandon()
            raise
