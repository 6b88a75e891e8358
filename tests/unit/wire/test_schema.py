"""Dataclasses to canonical msgpack and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Optional

import msgpack
import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, Version
from pulsenet.wire.schema import INTEGER_MAX, LATER, CountMax, SizeExact, SizeMax, cut_text, decode_value, encode_value


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int


@dataclass(frozen=True, slots=True)
class Sample:
    zeta: int
    alpha: bool
    text: Annotated[str, SizeMax(8)]
    free_text: str
    data: Annotated[bytes, SizeMax(4)]
    free_data: bytes
    exact: Annotated[bytes, SizeExact(2)]
    digest: Digest
    maybe: Annotated[bytes, SizeMax(4)] | None
    version: Version
    colour: Colour
    inner: Annotated[tuple[Inner, ...], CountMax(2)]
    pairs: Annotated[tuple[tuple[str, int], ...], CountMax(2)]


GOOD: dict[str, Any] = {
    "zeta": 300,
    "alpha": True,
    "text": "grün",
    "free_text": "",
    "data": b"1234",
    "free_data": b"",
    "exact": b"ab",
    "digest": bytes(range(32)),
    "maybe": None,
    "version": Version(1, 70_000),
    "colour": Colour.GREEN,
    "inner": (Inner(1), Inner(2)),
    "pairs": (("a", 1),),
}


def plain(**changes: Any) -> dict[str, Any]:
    fields = {
        **GOOD,
        "version": [1, 70_000],
        "colour": "green",
        "inner": [{"number": 1}, {"number": 2}],
        "pairs": [["a", 1]],
        **changes,
    }
    return dict(sorted(fields.items()))


def code_of(fields: object) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_value(Sample, msgpack.packb(fields))
    return caught.value.code


def test_the_encoding_is_the_sorted_map_of_all_fields() -> None:
    assert encode_value(Sample(**GOOD)) == msgpack.packb(plain())


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_what_was_encoded_comes_back(wrap: Any) -> None:
    sample = Sample(**GOOD)
    assert decode_value(Sample, wrap(encode_value(sample))) == sample


def test_an_unknown_field_is_ignored() -> None:
    """A-MSG-6."""
    assert decode_value(Sample, msgpack.packb(plain(later={"x": [1, None]}))) == Sample(**GOOD)
    assert decode_value(Sample, msgpack.packb(plain(aaa=1))) == Sample(**GOOD)


def test_a_missing_field_is_refused() -> None:
    """A-MSG-6."""
    for name in GOOD:
        fields = plain()
        del fields[name]
        assert code_of(fields) == "schema"


@pytest.mark.parametrize(
    "changes",
    [
        {"zeta": -1},
        {"zeta": INTEGER_MAX + 1},
        {"zeta": True},
        {"zeta": "1"},
        {"zeta": None},
        {"alpha": 1},
        {"text": "123456789"},
        {"text": b"1"},
        {"data": b"12345"},
        {"data": "1234"},
        {"exact": b"a"},
        {"exact": b"abc"},
        {"digest": bytes(31)},
        {"digest": bytes(33)},
        {"maybe": b"12345"},
        {"maybe": 0},
        {"version": [1]},
        {"version": [1, 2, 3]},
        {"version": 1},
        {"version": [1, -2]},
        {"colour": "blue"},
        {"colour": "magenta"},
        {"inner": [{"number": 1}] * 3},
        {"inner": [1]},
        {"inner": {"number": 1}},
        {"pairs": [["a"]]},
    ],
)
def test_a_value_of_another_type_or_size_is_refused_by_both_ends(changes: dict[str, Any]) -> None:
    assert code_of(plain(**changes)) == "schema"


@pytest.mark.parametrize(
    "changes",
    [
        {"zeta": -1},
        {"zeta": INTEGER_MAX + 1},
        {"zeta": True},
        {"zeta": 1.0},
        {"alpha": 1},
        {"text": "123456789"},
        {"text": "grünün!"},
        {"text": b"1"},
        {"free_text": "\ud800"},
        {"data": b"12345"},
        {"data": "1234"},
        {"exact": b"a"},
        {"digest": bytes(31)},
        {"version": (1, 2)},
        {"colour": "blue"},
        {"inner": (Inner(1),) * 3},
        {"inner": [Inner(1)]},
        {"inner": (1,)},
        {"pairs": (("a",),)},
        {"pairs": (["a", 1],)},
    ],
)
def test_we_never_encode_what_a_peer_would_refuse(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_value(Sample(**{**GOOD, **changes}))


@pytest.mark.parametrize("value", [1.0, 1.5])
def test_a_float_where_an_integer_is_due_is_refused(value: float) -> None:
    """A-MSG-6."""
    assert code_of(plain(zeta=value)) == "decode"


def test_keys_that_are_doubled_unsorted_or_no_text_are_refused() -> None:
    """A-MSG-6."""
    one = b"\xa6number\x01"
    for body in (b"\x82" + one + one, b"\x82" + one + b"\xa1a\x01", b"\x81\x01\x01"):
        with pytest.raises(RemoteProtocolError, match="decode"):
            decode_value(Inner, body)


def test_trailing_bytes_are_refused() -> None:
    """A-MSG-5."""
    with pytest.raises(RemoteProtocolError, match="decode"):
        decode_value(Sample, encode_value(Sample(**GOOD)) + b"\x00")


def test_bytes_like_fields_are_taken_as_they_are() -> None:
    assert decode_value(Sample, encode_value(Sample(**{**GOOD, "data": bytearray(b"12")}))).data == b"12"
    assert encode_value(Sample(**{**GOOD, "data": memoryview(b"1234")})) == encode_value(Sample(**GOOD))


def test_the_older_spelling_of_optional_means_the_same() -> None:
    @dataclass(frozen=True, slots=True)
    class Older:
        maybe: Optional[int]  # noqa: UP045

    Older.__annotations__["maybe"] = Optional[int]  # noqa: UP045
    assert decode_value(Older, encode_value(Older(None))) == Older(None)
    assert decode_value(Older, encode_value(Older(5))) == Older(5)


@pytest.mark.parametrize(
    "annotation", [float, dict, Annotated[int, SizeMax(1)], Annotated[str, CountMax(1)], list[int]]
)
def test_an_annotation_without_a_wire_form_is_our_own_mistake(annotation: Any) -> None:
    @dataclass(frozen=True, slots=True)
    class Wrong:
        field: Any

    Wrong.__annotations__["field"] = annotation
    with pytest.raises(LocalProtocolError, match="no wire form"):
        encode_value(Wrong(1))


@dataclass(frozen=True, slots=True)
class Older:
    number: int


@dataclass(frozen=True, slots=True)
class Newer:
    number: int
    names: Annotated[tuple[Annotated[str, SizeMax(4)], ...], CountMax(2)] = field(default=(), metadata=LATER)
    count: int = 7
    """A default alone lets no sender leave a field out."""


def test_a_field_that_came_later_may_be_missing_and_is_always_written() -> None:
    newer = Newer(1, ("a",))
    assert decode_value(Newer, encode_value(newer)) == newer
    assert decode_value(Older, encode_value(newer)) == Older(1)
    without = msgpack.packb({"count": 7, "number": 1})
    assert decode_value(Newer, without) == Newer(1)
    assert b"names" in encode_value(Newer(1))
    with pytest.raises(RemoteProtocolError, match="schema"):
        decode_value(Newer, msgpack.packb({"number": 1}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", "short"),
        ("x" * 9, "x" * 8),
        ("\u00fc" * 5, "\u00fc" * 4),
        ("abcdefg\u00fc", "abcdefg"),
        ("\udcff", "\\udcff"),
    ],
)
def test_a_text_is_cut_to_bytes_and_never_inside_a_character(text: str, expected: str) -> None:
    assert cut_text(text, 8) == expected
