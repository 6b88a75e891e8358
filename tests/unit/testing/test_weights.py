"""The tiny model goes through the real codec, and a mirror that fails is exactly what it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet.chain.records import Kind, Manifest
from pulsenet.ids import Digest, RunId, Version
from pulsenet.node.events import HopApplied, HopFailed
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.testing.weights import (
    TABLE,
    FakeMirror,
    change_region,
    compute_root_of,
    make_region,
    store_anchor,
    store_patch,
)

NO_DIGEST = Digest(bytes(32))


class Chain:
    """An anchor at 1 and a patch to 2, in a store."""

    def __init__(self) -> None:
        chance = Chance(5)
        self.store = FakeStore()
        self.first = make_region(chance)
        self.second = change_region(self.first, chance, 50)
        anchor = store_anchor(self.store, self.first)
        patch, _ = store_patch(self.store, self.first, self.second)
        self.anchor = self.manifest(Kind.ANCHOR, 1, self.first, anchor.blob_id)
        self.patch = self.manifest(Kind.PATCH, 2, self.second, patch.blob_id)

    def manifest(self, kind: Kind, number: int, region: bytearray, blob_id: Digest) -> Manifest:
        return Manifest(
            run_id=RunId(bytes(32)),
            revision=0,
            term=0,
            kind=kind,
            base_version=None if kind is Kind.ANCHOR else Version(0, number - 1),
            version=Version(0, number),
            base_root=None,
            root=compute_root_of(region),
            table_digest=TABLE.digest,
            blob_id=blob_id,
            raw_size_bytes=TABLE.size_bytes,
            encoded_size_bytes=1,
            changed_count=0,
            element_count=TABLE.element_count,
            codec_id=0,
            trainer_step=0,
            previous=None,
        )


def test_an_anchor_and_a_patch_give_the_publishers_bits() -> None:
    chain, mirror = Chain(), FakeMirror()
    assert mirror.apply(chain.anchor, chain.store) == HopApplied(Version(0, 1), chain.anchor.root)
    assert mirror.apply(chain.patch, chain.store) == HopApplied(Version(0, 2), chain.patch.root)
    assert mirror.region is not None
    assert [
        bytes(TABLE.view(mirror.region, index)) == bytes(TABLE.view(chain.second, index))
        for index in range(len(TABLE.tensors))
    ] == [True] * len(TABLE.tensors)


def test_a_patch_on_nothing_is_refused() -> None:
    chain, mirror = Chain(), FakeMirror()
    assert mirror.apply(chain.patch, chain.store) == HopFailed(Version(0, 2), "base_mismatch", None)


def test_a_flipped_bit_is_found_and_nothing_moves() -> None:
    """A-CHAIN-5."""
    chain, mirror = Chain(), FakeMirror()
    mirror.apply(chain.anchor, chain.store)
    mirror.flip_bit(Chance(1))
    assert mirror.region is not None
    before = bytes(mirror.region)
    assert mirror.apply(chain.patch, chain.store) == HopFailed(Version(0, 2), "base_mismatch", Version(0, 1))
    assert bytes(mirror.region) == before


@pytest.mark.parametrize("fault", ["root", "blob"])
def test_a_false_anchor_changes_nothing(fault: str) -> None:
    chain, mirror = Chain(), FakeMirror()
    false = replace(chain.anchor, **({"root": NO_DIGEST} if fault == "root" else {"blob_id": chain.patch.blob_id}))
    failed = mirror.apply(false, chain.store)
    assert isinstance(failed, HopFailed)
    assert failed.reason == ("root_mismatch" if fault == "root" else "base_mismatch")
    assert mirror.region is None


def test_an_unreadable_patch_is_called_that() -> None:
    chain, mirror = Chain(), FakeMirror()
    mirror.apply(chain.anchor, chain.store)
    unreadable = replace(chain.patch, blob_id=chain.anchor.blob_id)
    assert mirror.apply(unreadable, chain.store) == HopFailed(Version(0, 2), "decode", Version(0, 1))


def test_a_preparation_counts_for_its_own_hop_and_is_dropped_by_any() -> None:
    chain = Chain()
    patch = replace(chain.patch, base_root=compute_root_of(chain.first))
    mirror = FakeMirror()
    mirror.apply(chain.anchor, chain.store)
    mirror.prepare(patch)
    assert isinstance(mirror.apply(patch, chain.store), HopApplied)
    assert mirror.prepared_count == 1
    mirror.apply(chain.anchor, chain.store)
    mirror.prepare(patch)
    mirror.drop_preparation()
    mirror.apply(patch, chain.store)
    mirror.apply(chain.anchor, chain.store)
    mirror.prepare(patch)
    mirror.apply(chain.anchor, chain.store)
    mirror.apply(patch, chain.store)
    assert mirror.prepared_count == 1
    with pytest.raises(AssertionError, match="other weights"):
        mirror.prepare(patch)
