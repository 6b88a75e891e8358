"""Everything that is measured, behind one interface: our codecs and the layouts of public systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.codec.changes import apply_changes
from pulsenet.codec.patch import CODEC_CHOICES, RunBlocks, decode_patch, encode_patch
from pulsenetd.bench.layouts import PUBLIC_LAYOUTS, Layout
from pulsenetd.bench.pairs import Bytes, Pair


@dataclass(frozen=True, slots=True)
class Contender:
    """A way from one version to the next."""

    name: str
    encode: Callable[[Pair, RunBlocks], list[bytes]]
    """The pieces that travel; they count with their lengths."""
    decode_into: Callable[[Pair, list[bytes], Bytes, RunBlocks], None]
    """Turn a region that holds the old version into the new one, in place; looks at nothing else of the pair."""


def list_contenders() -> list[Contender]:
    """Return our codecs, then the public layouts."""
    ours = [Contender(codec, _encode_with(codec), _decode_patch) for codec in CODEC_CHOICES]
    public = [Contender(layout.name, _encode_by(layout), _decode_by(layout)) for layout in PUBLIC_LAYOUTS]
    return ours + public


def _encode_with(codec: str) -> Callable[[Pair, RunBlocks], list[bytes]]:
    def encode(pair: Pair, run_blocks: RunBlocks) -> list[bytes]:
        return list(encode_patch(pair.table, pair.old, pair.new, codec=codec, run_blocks=run_blocks))

    return encode


def _decode_patch(pair: Pair, pieces: list[bytes], region: Bytes, run_blocks: RunBlocks) -> None:
    for changes in decode_patch(pieces, pair.table, region, run_blocks=run_blocks):
        apply_changes(pair.table.view(region, changes.tensor_index), changes)


def _encode_by(layout: Layout) -> Callable[[Pair, RunBlocks], list[bytes]]:
    def encode(pair: Pair, run_blocks: RunBlocks) -> list[bytes]:
        def encode_tensor(tensor_index: int) -> bytes:
            return layout.encode(pair.table.tensors[tensor_index], *pair.tensor_views(tensor_index))

        return list(run_blocks(encode_tensor, range(len(pair.table.tensors))))

    return encode


def _decode_by(layout: Layout) -> Callable[[Pair, list[bytes], Bytes, RunBlocks], None]:
    def decode(pair: Pair, pieces: list[bytes], region: Bytes, run_blocks: RunBlocks) -> None:
        def decode_tensor(tensor_index: int) -> None:
            spec = pair.table.tensors[tensor_index]
            layout.decode_into(spec, pieces[tensor_index], pair.table.view(region, tensor_index))

        list(run_blocks(decode_tensor, range(len(pair.table.tensors))))

    return decode
