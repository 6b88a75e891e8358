"""Figures are the contenders' own sizes, and nothing wrong is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.codec.patch import CODEC_CHOICES, PatchTotals, encode_patch
from pulsenet.errors import IntegrityError, LocalProtocolError
from pulsenet.tensors.params import ParameterTable
from pulsenetd.bench import measure
from pulsenetd.bench.contenders import Contender, list_contenders
from pulsenetd.bench.measure import measure_pairs
from pulsenetd.bench.pairs import Bytes, Pair

MakePair = Callable[[ParameterTable, float], Pair]


def test_every_codec_and_every_public_layout_is_measured(mixed_table: ParameterTable, make_pair: MakePair) -> None:
    pair = make_pair(mixed_table, 0.02)
    figures = measure_pairs([pair], seconds=1e-4)
    names = [codec["name"] for codec in figures["codecs"]]
    assert names == [*CODEC_CHOICES, "published", "index_value_zstd", "xor_zstd"]
    assert figures["dense_bytes"] == mixed_table.size_bytes
    assert 0 < figures["entropy_bits"]["exponent"] <= figures["entropy_bits"]["density"]
    for codec in figures["codecs"]:
        assert codec["ratio"] == pytest.approx(mixed_table.size_bytes / codec["bytes"])
        assert codec["bits_per_change"] == pytest.approx(codec["bytes"] * 8 / figures["changes"])
        speeds = [value for name, value in codec.items() if name.endswith("_mb_s")]
        assert len(speeds) == 4
        assert all(speed > 0 for speed in speeds)
    assert all(rate > 0 for rate in figures["memory"].values())


def test_sizes_are_those_of_patches_and_add_up_over_pairs(mixed_table: ParameterTable, make_pair: MakePair) -> None:
    pairs = [make_pair(mixed_table, share) for share in (0.01, 0.3)]
    expected = changed = 0
    for pair in pairs:
        totals = PatchTotals()
        list(encode_patch(pair.table, pair.old, pair.new, codec="plain", totals=totals))
        expected, changed = expected + totals.encoded_size_bytes, changed + totals.changed_count
    figures = measure_pairs(pairs, seconds=0, names=["plain"])
    (plain,) = figures["codecs"]
    assert (plain["bytes"], figures["changes"], figures["pairs"]) == (expected, changed, 2)


def test_sizes_alone_need_no_time(mixed_table: ParameterTable, make_pair: MakePair) -> None:
    figures = measure_pairs([make_pair(mixed_table, 0.1)], seconds=0, names=["absolute"])
    (absolute,) = figures["codecs"]
    assert absolute["encode_mb_s"] is absolute["decode_all_cores_mb_s"] is None
    assert set(figures["memory"].values()) == {None}


def test_versions_that_are_the_same_have_figures_too(mixed_table: ParameterTable, make_pair: MakePair) -> None:
    figures = measure_pairs([make_pair(mixed_table, 0.0)], seconds=0)
    assert figures["changes"] == 0
    assert figures["entropy_bits"] == {"density": 0.0, "exponent": 0.0}
    assert {codec["bits_per_change"] for codec in figures["codecs"]} == {0.0}


def test_a_contender_that_gives_other_bits_is_refused(
    mixed_table: ParameterTable, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_into(pair: Pair, pieces: list[bytes], region: Bytes, run_blocks: Any) -> None:
        region[:] = pair.new
        region[3] ^= 1

    wrong = Contender("wrong", lambda pair, run_blocks: [b"x"], decode_into)
    monkeypatch.setattr(measure, "list_contenders", lambda: [*list_contenders(), wrong])
    with pytest.raises(IntegrityError, match="wrong"):
        measure_pairs([make_pair(mixed_table, 0.1)], seconds=0, names=["wrong"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="fast"):
        measure_pairs([], names=["plain", "fast"])


def test_progress_names_what_is_measured(mixed_table: ParameterTable, make_pair: MakePair) -> None:
    told: list[str] = []
    measure_pairs([make_pair(mixed_table, 0.1)], seconds=0, names=["plain", "xor_zstd"], on_progress=told.append)
    assert told == ["entropy bounds", "plain", "xor_zstd"]
