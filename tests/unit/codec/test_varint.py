import pytest

from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import RemoteProtocolError


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (16_383, "ff7f"), (16_384, "808001"), ((1 << 63) - 1, "ff" * 8 + "7f")],
)
def test_numbers_are_shortest_leb128(value: int, encoded: str) -> None:
    assert encode_varint(value).hex() == encoded
    reader = BodyReader(bytes.fromhex(encoded))
    assert reader.read_varint() == value
    reader.expect_end()


@pytest.mark.parametrize(
    ("encoded", "code"),
    [("8000", "patch-varint"), ("ff" * 9, "patch-varint"), ("80", "patch-truncated"), ("", "patch-truncated")],
)
def test_long_endless_and_cut_numbers_are_refused(encoded: str, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        BodyReader(bytes.fromhex(encoded)).read_varint()
    assert raised.value.code == code


def test_reader_stays_inside_its_body() -> None:
    reader = BodyReader(b"abc")
    assert reader.take(2) == b"ab"
    with pytest.raises(RemoteProtocolError, match="patch-trailing"):
        reader.expect_end()
    with pytest.raises(RemoteProtocolError, match="patch-truncated"):
        reader.take(2)
    assert reader.take(1) == b"c"
    assert reader.take(0) == b""
    reader.expect_end()
