import msgpack
import pytest

from pulsenet.errors import RemoteProtocolError
from pulsenet.tensors.table_format import RawTable, pack_table, unpack_table

TABLE = RawTable(
    tensors=[("a" * 31, "BF16", [1, 127, 128, 255, 256, 65_535, 65_536, 1 << 40]), ("b" * 300, "U8", [])],
    aliases=[("c", "b" * 300)],
    excluded=["d" * 200],
)


def test_table_comes_back_as_it_was_packed() -> None:
    assert unpack_table(pack_table(TABLE)) == TABLE


def test_many_entries_use_the_longer_headers() -> None:
    table = RawTable([(f"{number:05}", "U8", []) for number in range(65_536)], [], [f"{n}" for n in range(300)])
    assert unpack_table(pack_table(table)) == table


def test_every_cut_is_refused() -> None:
    data = pack_table(TABLE)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError, match="table-decode"):
            unpack_table(data[:size])


@pytest.mark.parametrize(
    "value",
    [
        {"aliases": [], "excluded": []},
        {"excluded": [], "aliases": [], "tensors": []},
        {"aliases": [], "excluded": [], "tensors": {}},
        {"aliases": [["a"]], "excluded": [], "tensors": []},
        {"aliases": [], "excluded": [1], "tensors": []},
        {"aliases": [], "excluded": [], "tensors": [["a", "U8", [-1]]]},
        {"aliases": [], "excluded": [], "tensors": [["a", "U8", [1.5]]]},
        {"aliases": [], "excluded": [], "tensors": [["a", "U8", [None]]]},
        {"aliases": [], "excluded": [], "tensors": [["a", "U8", [1] * 9]]},
        {"aliases": [], "excluded": [], "tensors": [["a" * 513, "U8", []]]},
        {"aliases": [], "excluded": ["a"] * 65_537, "tensors": []},
        [],
    ],
)
def test_another_structure_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="table-decode"):
        unpack_table(msgpack.packb(value))


def test_byte_after_the_end_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="after the end"):
        unpack_table(pack_table(TABLE) + b"\0")


def test_text_that_is_not_utf8_is_refused() -> None:
    data = pack_table(RawTable([], [], ["ab"])).replace(b"\xa2ab", b"\xa2\xff\xfe")
    with pytest.raises(RemoteProtocolError, match="UTF-8"):
        unpack_table(data)


@pytest.mark.parametrize("data", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b""])
def test_five_bytes_that_claim_four_thousand_million_items_cost_nothing(data: bytes) -> None:
    """A-MSG-1, A-MSG-2 for the table."""
    with pytest.raises(RemoteProtocolError, match="table-decode"):
        unpack_table(data)
