"""What the daemon's orders ask of a training process: encode, check, prepare a move, write a state anchor.

Only here are blobs made from arrays and arrays from blobs; the daemon moves bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from pulsenet.codec.contribution import decode_contribution
from pulsenet.codec.patch import PatchTotals, RunBlocks
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import rounds_protocol as local
from pulsenet.local.rounds_client import RoundsConnection, StoredBlob
from pulsenet.node.effects import Fate
from pulsenet.outer.aggregate import AggregateReader, MemberParts, list_parts
from pulsenet.outer.blob import BlobContent, decode_blob, encode_blob, inspect_blob
from pulsenet.outer.checks import Expected, compute_norm
from pulsenet.outer.contribution import Contribution
from pulsenet.outer.floats import FP32s, fp32_from_bits, fp32_to_bits
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.outer.state_anchor import Beside, StateHeader, check_state_size, decode_state, encode_state, hash_state
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.exchange import Aggregate, FinalRound, Outcome, Restoration, StateView
from pulsenet.training.round_blobs import BlobSpool, HostTheta, SpooledBlob
from pulsenet.training.slice_work import SliceWork, is_content_fault
from pulsenet.wire.sections import BlobCutter

READ_TRIES_MAX: Final = 3
"""A blob that lost a chunk on the disk is fetched again by the daemon; after so many tries it is asked for later."""

READ_PAUSE_SECONDS: Final = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """The contribution that was put last, and the blob it became."""

    contribution: Contribution
    blob: StoredBlob


class RoundWork:
    """Carries out orders against one trainer's state.

    Args:
        table: FP32 masters.
        settings: Of the run.
        state: Theta and momentum, read where they lie.
        peer_id: The node's key: whose contribution is the own one.
        spool_directory: Where the blobs of a round lie while it is stepped.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.
    """

    def __init__(
        self,
        table: ParameterTable,
        settings: OuterSettings,
        state: StateView,
        peer_id: PeerId,
        *,
        spool_directory: Path | None = None,
        run_blocks: RunBlocks = map,
    ) -> None:
        self._table = table
        self._settings = settings
        self._state = state
        self._peer_id = peer_id
        self._spool_directory = spool_directory
        self._run_blocks = run_blocks
        self._own: _Own | None = None
        self._sound: tuple[Digest | None, set[Digest]] = (None, set())
        """Blobs found fit to be counted, of contributions to the state with this root."""
        self._spool: BlobSpool | None = None
        self._slices = SliceWork(table, settings, spool_directory=spool_directory, run_blocks=run_blocks)

    def put_contribution(self, connection: RoundsConnection, contribution: Contribution) -> local.OfferContribution:
        """Encode the own contribution into a blob, and return what to say of it.

        Raises:
            StorageError: the daemon's disk does not take it.
        """
        totals = PatchTotals()
        pieces = encode_blob(contribution, self._table, self._theta(), totals=totals, run_blocks=self._run_blocks)
        blob = connection.put_blob(pieces)
        self._own = _Own(contribution, blob)
        return local.OfferContribution(
            round_index=contribution.round_index,
            base_state_root=contribution.state_root,
            blob_id=blob.blob_id,
            encoded_size_bytes=blob.size_bytes,
            entry_count=contribution.sent_count,
            element_count=self._table.element_count,
            norm_bits=fp32_to_bits(compute_norm(contribution)),
            codec_id=totals.codec_id,
        )

    def check(self, connection: RoundsConnection, order: local.CheckOrder) -> local.Checked:
        """Look into a contribution, for the coordinator.

        Raises:
            UnavailableError: its blob cannot be read now.
        """
        return local.Checked(order.contribution_digest, self._find_fault(connection, order))

    def sum_slices(self, connection: RoundsConnection, order: local.SumOrder) -> local.Summed | local.SumRefused:
        """Sum slices of a round, put those that this node serves, and say what all of them are called.

        Raises:
            UnavailableError: a blob cannot be read now.
        """
        root = self._state.state_root
        if root is None or (order.round_index, order.base_state_root) != (self._state.round_index, root):
            return local.SumRefused(order.round_index, "base")
        try:
            return local.Summed(order.round_index, tuple(self._slices.sum(connection, order, root, self._theta())))
        except StorageError as error:
            return local.SumRefused(order.round_index, error.reason)
        except RemoteProtocolError as error:
            if not is_content_fault(error.code):
                raise
            return local.SumRefused(order.round_index, "decode")

    def prepare_step(
        self, connection: RoundsConnection, order: local.StepOrder
    ) -> tuple[FinalRound | local.StepFailed, str]:
        """Bring everything a final round needs to this process, look into it, and return the move and its reason.

        Until the move is made nothing changed. Its blobs lie in a spool until :meth:`forget_step`.
        """
        try:
            return self._prepare_step(connection, order), order.reason
        except StorageError as error:
            self.forget_step()
            return local.StepFailed(order.round_index, error.reason), str(error)
        except RemoteProtocolError as error:
            self.forget_step()
            if error.code not in _STEP_FAULTS:
                raise
            return local.StepFailed(order.round_index, error.code), error.detail

    def forget_step(self) -> None:
        """Let go of the blobs of a round."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def prepare_restore(
        self, connection: RoundsConnection, order: local.RestoreOrder
    ) -> Restoration | local.RestoreRefused:
        """Read a state anchor once to hash it; making the move reads it again. So no second copy is ever held.

        Raises:
            UnavailableError: its blob cannot be read now.
        """
        header = self._header(order.state_root, order.round_index)
        try:
            check_state_size(self._table, order.encoded_size_bytes, has_inner_state=header.has_inner_state)
        except RemoteProtocolError as error:
            return local.RestoreRefused(error.code)

        def read() -> Iterator[memoryview]:
            return connection.fetch_blob(order.blob_id, order.encoded_size_bytes)

        def hash_once() -> str:
            try:
                return "" if hash_state(read(), self._table, header) == order.state_root else "root_mismatch"
            except RemoteProtocolError as error:
                if error.code not in _STATE_FAULTS:
                    raise
                return error.code

        reason = _read_again(hash_once)
        if reason:
            return local.RestoreRefused(reason)
        return Restoration(_BlobAnchor(self._table, header, read), order.drops_residual)

    def put_anchor(
        self, connection: RoundsConnection, order: local.AnchorOrder
    ) -> local.AnchorStored | local.AnchorRefused:
        """Write the own state as a blob."""
        state, root = self._state, self._state.state_root
        if root is None or state.round_index != order.round_index:
            return local.AnchorRefused(order.round_index, "round")
        header = self._header(root, state.round_index)
        try:
            blob = connection.put_blob(
                encode_state(self._table, header, lambda index: (state.theta(index), state.momentum(index)))
            )
        except StorageError as error:
            return local.AnchorRefused(order.round_index, error.reason)
        return local.AnchorStored(state.round_index, root, blob.blob_id, blob.size_bytes)

    def _header(self, root: Digest, round_index: int) -> StateHeader:
        return StateHeader(root, round_index, has_inner_state=self._settings.algorithm is Algorithm.DDP)

    def _find_fault(self, connection: RoundsConnection, order: local.CheckOrder) -> str:
        root = self._state.state_root
        if root is None or (order.round_index, order.base_state_root) != (self._state.round_index, root):
            return "base"
        if order.element_count != self._table.element_count:
            return "shape"
        if self._own is not None and order.blob_id == self._own.blob.blob_id:
            # Made and checked here.
            return ""
        content, blob_id = _read_again(lambda: self._inspect(connection, order, root))
        if content.reason:
            return content.reason
        if blob_id != order.blob_id:
            # Cut otherwise than at its sections, it could not be summed by slice.
            return "decode"
        if content.entry_count != order.entry_count:
            return "shape"
        if fp32_to_bits(content.norm) != order.norm_bits:
            return "norm"
        self._sound_blobs(root).add(order.blob_id)
        return ""

    def _inspect(
        self, connection: RoundsConnection, order: local.CheckOrder, root: Digest
    ) -> tuple[BlobContent, Digest | None]:
        """Return what is in a contribution, and the id it has when it is cut as it must be."""
        cutter = BlobCutter()

        def read() -> Iterator[memoryview]:
            for piece in connection.fetch_blob(order.blob_id, order.encoded_size_bytes):
                cutter.feed(piece)
                yield piece

        try:
            content = inspect_blob(read(), self._expected(root), self._theta(), run_blocks=self._run_blocks)
            if content.reason:
                return content, None
            cutter.finish()
        except LocalProtocolError as error:
            return BlobContent("decode", str(error), 0, 0.0, 0), None
        return content, cutter.chunk_list.blob_id

    def _prepare_step(self, connection: RoundsConnection, order: local.StepOrder) -> FinalRound:
        root = self._state.state_root
        if root is None or (order.round_index, order.base_state_root) != (self._state.round_index, root):
            raise RemoteProtocolError("base", "the round steps from another state than the one held")
        self.forget_step()
        self._spool = spool = BlobSpool(self._spool_directory)
        members: dict[bytes, MemberParts] = {}
        own, own_scale = None, 1.0
        for member in order.members:
            scale = fp32_from_bits(member.scale_bits & 0xFFFF_FFFF)
            if not 0.0 < scale <= 1.0:
                raise RemoteProtocolError("scale", f"{scale}")
            is_own = member.peer_id == self._peer_id
            contribution: Contribution | None = None
            if order.slices and not is_own:
                continue
            if self._own is not None and self._own.blob.blob_id == member.blob_id:
                contribution = self._own.contribution
                members[member.peer_id] = MemberParts(list_parts(contribution), scale)
            else:
                spooled = spool.add(connection.fetch_blob(member.blob_id, member.encoded_size_bytes))
                self._look_into(spool, spooled, member, root)
                parts = decode_contribution(
                    spool.read(spooled), self._table, self._theta(), state_root=root, run_blocks=self._run_blocks
                )
                members[member.peer_id] = MemberParts(parts, scale)
                if is_own:
                    contribution = self._decode(spool, spooled)
            if is_own and order.fate is Fate.COUNTED:
                own, own_scale = contribution, float(scale)
        if (own is None) == (order.fate is Fate.COUNTED):
            raise RemoteProtocolError("members", f"the own work is {order.fate} but its contribution is not listed so")
        aggregate: Aggregate | None = AggregateReader(members, self._table, self._settings) if members else None
        if order.slices:
            aggregate = self._slices.open(connection, spool, order, root, self._theta())
        return FinalRound(order.round_index, root, aggregate, own, own_scale, Outcome(order.fate))

    def _look_into(self, spool: BlobSpool, spooled: SpooledBlob, member: local.CountedMember, root: Digest) -> None:
        """Read a blob to its end before anything moves: in the middle of a step it would be too late."""
        if member.blob_id in self._sound_blobs(root):
            return
        content = inspect_blob(spool.read(spooled), self._expected(root), self._theta(), run_blocks=self._run_blocks)
        if content.reason:
            raise RemoteProtocolError(content.reason, f"a counted contribution: {content.detail}")

    def _decode(self, spool: BlobSpool, spooled: SpooledBlob) -> Contribution:
        """Return the own contribution of an earlier life."""
        blob = b"".join(spool.read(spooled))
        return decode_blob(
            blob, self._table, self._theta(), is_dense=self._settings.is_dense, run_blocks=self._run_blocks
        )

    def _sound_blobs(self, root: Digest) -> set[Digest]:
        if self._sound[0] != root:
            self._sound = (root, set())
        return self._sound[1]

    def _theta(self) -> HostTheta:
        return HostTheta(self._state, len(self._table.tensors))

    def _expected(self, root: Digest) -> Expected:
        return Expected(
            table=self._table,
            round_index=self._state.round_index,
            state_root=root,
            is_dense=self._settings.is_dense,
            norm_max=self._settings.norm_max,
        )


_STEP_FAULTS: Final = frozenset({"base", "shape", "finite", "norm", "decode", "scale", "members", "slices"})
"""What may be wrong with a round; other codes are the connection's."""

_STATE_FAULTS: Final = frozenset({"state-header", "mismatch", "state-truncated", "state-trailing", "state-slots"})


class _BlobAnchor:
    """A state anchor that is read from the daemon when it is asked for."""

    def __init__(self, table: ParameterTable, header: StateHeader, read: Callable[[], Iterator[memoryview]]) -> None:
        self.round_index = header.round_index
        self.state_root = header.state_root
        self._table = table
        self._header = header
        self._read = read

    def tensors(self) -> Iterator[tuple[int, FP32s, Beside]]:
        """Yield position, theta and momentum, or inner state, of each tensor.

        Raises:
            UnavailableError: the daemon went away, or cannot read the blob any more.
        """
        try:
            yield from decode_state(self._read(), self._table, self._header)
        except (StorageError, RemoteProtocolError) as error:
            raise UnavailableError(f"the state anchor of round {self.round_index} broke off: {error}") from error


def _read_again(read: Callable[[], Result]) -> Result:
    """Return what ``read`` returns, trying again while the daemon mends the blob.

    Raises:
        UnavailableError: it could not.
    """
    for _ in range(READ_TRIES_MAX - 1):
        try:
            return read()
        except StorageError:
            time.sleep(READ_PAUSE_SECONDS)
    try:
        return read()
    except StorageError as error:
        raise UnavailableError(f"a blob of the rounds cannot be read now: {error} ({error.reason})") from error
