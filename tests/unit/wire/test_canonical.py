"""The strict reader of canonical msgpack."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.wire.canonical import CanonicalReader, Kind


def skip_all(data: bytes) -> None:
    reader = CanonicalReader(data)
    reader.skip()
    reader.finish()


def refuse(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        skip_all(data)
    assert caught.value.code == "decode"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        *(sign * number for sign in (1, -1) for number in (0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 65535, 65536)),
        2**31,
        -(2**31),
        -(2**31) - 1,
        2**32 - 1,
        2**32,
        2**64 - 1,
        -(2**63),
        *("x" * size for size in (0, 31, 32, 255, 256, 65535, 65536)),
        *(bytes(size) for size in (0, 255, 256, 65535, 65536)),
        *([0] * size for size in (0, 15, 16, 65535, 65536)),
        *({f"{key:05}": 0 for key in range(size)} for size in (0, 15, 16, 65536)),
        "grün",
        {"a": [1, {"b": b"c"}]},
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:12]}-{len(str(value))}",
)
def test_what_msgpack_writes_shortest_is_canonical(value: object) -> None:
    skip_all(msgpack.packb(value))


@pytest.mark.parametrize("number", [0, 127, 128, 2**16, 2**32, 2**64 - 1, -1, -32, -33, -128, -129, -(2**63)])
def test_integers_are_read_exactly(number: int) -> None:
    assert CanonicalReader(msgpack.packb(number)).read_head() == (Kind.INT, number)


@pytest.mark.parametrize(
    "text",
    [
        "cc 7f",
        "cd 00ff",
        "ce 0000ffff",
        "cf 00000000ffffffff",
        "d0 01",
        "d0 e0",
        "d1 ff80",
        "d1 0100",
        "d2 ffff8000",
        "d3 ffffffff80000000",
        "d9 01 61",
        "da 00ff" + "61" * 255,
        "db 0000ffff" + "61" * 65535,
        "c5 00ff" + "00" * 255,
        "c6 0000ffff" + "00" * 65535,
        "dc 000f" + "c0" * 15,
        "dd 0000ffff" + "c0" * 65535,
        "de 0001 a161 c0",
        "df 00000001 a161 c0",
    ],
)
def test_a_form_longer_than_needed_is_refused(text: str) -> None:
    refuse(bytes.fromhex(text))


@pytest.mark.parametrize("text", ["ddffffffff", "dfffffffff", "c6ffffffff", "c9ffffffff01"])
def test_a_huge_length_costs_nothing(text: str) -> None:
    """A-MSG-1."""
    tracemalloc.start()
    refuse(bytes.fromhex(text))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_deep_nesting_is_refused() -> None:
    """A-MSG-2."""
    refuse(b"\x91" * 100_000)
    refuse(b"\x81\xa1a" * 100_000)
    skip_all(b"\x91" * limits.MESSAGE_DEPTH_MAX + b"\xc0")
    refuse(b"\x91" * (limits.MESSAGE_DEPTH_MAX + 1) + b"\xc0")


@pytest.mark.parametrize(
    "text",
    [
        "ca3f800000",
        "cb3ff0000000000000",
        "c1",
        "c70001",
        "d40100",
        "d60100000000",
        "82 a161 c0 a161 c0",
        "82 a162 c0 a161 c0",
        "81 01 c0",
        "81 c4 01 61 c0",
        "a1 ff",
        "a3 eda080",
        "c0 c0",
        "",
        "a2 61",
        "c4 02 00",
        "cd 01",
        "92 c0",
        "81 a161",
        "dd 00010001" + "c0" * 65537,
    ],
    ids=lambda text: text[:20],
)
def test_bytes_outside_the_subset_are_refused(text: str) -> None:
    """A-MSG-6."""
    refuse(bytes.fromhex(text))
