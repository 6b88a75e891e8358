"""Slice blobs: the same bytes whoever writes them, and a header that says which slice they are."""

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.codec.blocks import BlockMap
from pulsenet.codec.contribution import EntryCodec, encode_entries
from pulsenet.codec.patch import PatchTotals
from pulsenet.codec.sections import SectionMap
from pulsenet.codec.slices import (
    SLICE_HEADER_SIZE_BYTES,
    SliceHeader,
    decode_slice,
    make_plane_encoder,
    write_slice,
)
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table([TensorSpec("a", "F32", (50,)), TensorSpec("b", "F32", (30,))])
ROOT = Digest(bytes(range(32)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 16)


def theta() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal(spec.element_count).astype(np.float32) for spec in TABLE.tensors]


def write(slice_index: int, slice_count: int, *, elements: int = 5) -> tuple[bytes, PatchTotals]:
    header = SliceHeader(TABLE.digest, ROOT, 3, slice_index, slice_count)
    blocks, weights = BlockMap(TABLE), theta()
    positions = np.arange(elements, dtype=np.uint32)

    def records():  # type: ignore[no-untyped-def]
        for index in SectionMap(TABLE).blocks_of(header.sections(SectionMap(TABLE))):
            block = blocks.block(index)
            here = positions[: block.element_count]
            own = block.cut(weights[block.tensor_index]).view(np.uint32)
            yield index, encode_entries(own, here, np.full(here.size, 0x3F800000, np.uint32), make_plane_encoder())

    totals = PatchTotals()
    return b"".join(write_slice(TABLE, records(), header, totals)), totals


def test_slices_hold_every_block_once() -> None:
    found = []
    for slice_index in range(3):
        header = SliceHeader(TABLE.digest, ROOT, 3, slice_index, 3)
        blob, totals = write(slice_index, 3)
        parts = list(decode_slice([blob], TABLE, theta(), header=header))
        assert totals.encoded_size_bytes == len(blob)
        assert totals.changed_count == sum(part.indices.size for part in parts)
        found += [(part.tensor_index, part.indices.tolist()) for part in parts]
    starts = [(0, 0), (0, 16), (0, 32), (0, 48), (1, 0), (1, 16)]
    sizes = [5, 5, 5, 2, 5, 5]
    assert found == [(t, list(range(s, s + n))) for (t, s), n in zip(starts, sizes, strict=True)]


def test_more_slices_than_sections_leave_some_empty() -> None:
    blob, totals = write(1, 99)
    assert len(blob) == SLICE_HEADER_SIZE_BYTES
    assert totals.encoded_size_bytes == SLICE_HEADER_SIZE_BYTES
    header = SliceHeader(TABLE.digest, ROOT, 3, 1, 99)
    assert list(decode_slice([blob], TABLE, theta(), header=header)) == []


def test_no_plane_is_a_frame() -> None:
    """What zstandard makes differs between its releases; a slice's bytes may not."""
    limits_of_frame = b"\x28\xb5\x2f\xfd"
    blob, totals = write(0, 1, elements=16)
    assert totals.codec_id == EntryCodec.FULL
    assert limits_of_frame not in blob
    assert make_plane_encoder().encode(np.zeros(1000, np.uint8)).endswith(bytes(1000))


@pytest.mark.parametrize("field", ["table_digest", "state_root", "round_index", "slice_index", "slice_count"])
def test_another_slice_is_refused(field: str) -> None:
    blob, _ = write(0, 3)
    values = {"table_digest": TABLE.digest, "state_root": ROOT, "round_index": 3, "slice_index": 0, "slice_count": 3}
    other = {"table_digest": ROOT, "state_root": TABLE.digest, "round_index": 4, "slice_index": 1, "slice_count": 4}
    header = SliceHeader(**(values | {field: other[field]}))  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="slice-header"):
        decode_slice([blob], TABLE, theta(), header=header)
    with pytest.raises(RemoteProtocolError, match="patch-truncated"):
        decode_slice([blob[:20]], TABLE, theta(), header=header)
    own = SliceHeader(**values)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="patch-trailing"):
        list(decode_slice([blob + b"\0"], TABLE, theta(), header=own))
