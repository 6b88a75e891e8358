"""Canonical msgpack for frozen dataclasses, driven by their annotations (SPEC section 2).

========================  ==============================================================
annotation                on the wire
========================  ==============================================================
dataclass                 map, keys ascending by UTF-8 bytes, every field present but ``LATER`` ones
``Version``               array [epoch, number]
``int``                   integer from 0 to 2**63 - 1
``bool``                  boolean
``str``                   text in UTF-8, bounded by ``SizeMax`` (in bytes)
``StrEnum``               text, one of its values
``bytes``                 bytes, bounded by ``SizeMax`` or fixed by ``SizeExact``
``PeerId`` and so on      bytes, exactly 32
``tuple[X, ...]``         array, bounded by ``CountMax``
``tuple[X, Y]``           array of exactly these items
``X | None``              nil or X
========================  ==============================================================
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgpack

from pulsenet import ids
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.wire.canonical import CanonicalReader, Kind

INTEGER_MAX = (1 << 63) - 1
"""Every integer field fits a signed 64-bit column and a numpy int64."""

T = TypeVar("T")

LATER: Mapping[str, bool] = types.MappingProxyType({"later": True})
"""Metadata of a field that older senders do not write; a reader then takes its default."""


@dataclass(frozen=True, slots=True)
class SizeMax:
    """Upper bound of ``bytes`` or UTF-8 text, in bytes."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class SizeExact:
    """Exact size of ``bytes``."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class CountMax:
    """Upper bound of a tuple's item count."""

    count: int


@dataclass(frozen=True, slots=True)
class _Codec:
    """How one annotation is written and read; ``write`` returns what ``msgpack.packb`` takes."""

    write: Callable[[Any], Any]
    read: Callable[[CanonicalReader], Any]


def encode_value(value: object) -> bytes:
    """Return the canonical encoding of a dataclass.

    Raises:
        LocalProtocolError: a field breaks its own annotation, so every peer would refuse the bytes.
    """
    annotation: Any = type(value)
    packed: bytes = msgpack.packb(_codec_of(annotation).write(value), use_bin_type=True)
    return packed


def cut_text(text: str, size_bytes_max: int) -> str:
    """Return as much of a text as so many bytes of UTF-8 hold; what has no such form, as of a file's name, is spelt."""
    return text.encode("utf-8", "backslashreplace")[:size_bytes_max].decode("utf-8", "ignore")


def decode_value(cls: type[T], data: bytes | bytearray | memoryview) -> T:
    """Return the dataclass encoded in ``data``; fields it does not know are ignored.

    Raises:
        RemoteProtocolError: ``decode`` for bytes that are not canonical, ``schema`` for a value that is
            not a ``cls``.
    """
    reader = CanonicalReader(bytes(data))
    annotation: Any = cls
    value: T = _codec_of(annotation).read(reader)
    reader.finish()
    return value


@functools.cache
def _codec_of(annotation: Any) -> _Codec:
    """Build the codec of an annotation once."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *bounds = typing.get_args(annotation)
        return _bounded_codec(base, bounds)
    if origin is typing.Union or origin is types.UnionType:
        (inner,) = [argument for argument in typing.get_args(annotation) if argument is not types.NoneType]
        return _optional_codec(_codec_of(inner))
    if origin is tuple:
        return _fixed_tuple_codec([_codec_of(argument) for argument in typing.get_args(annotation)])
    if annotation in (ids.PeerId, ids.Digest, ids.RunId):
        return _bytes_codec(0, ids.DIGEST_SIZE_BYTES, exact=True)
    if annotation is ids.Version:
        return _version_codec()
    if annotation is bool:
        return _bool_codec()
    if annotation is int:
        return _int_codec()
    if annotation is str:
        return _text_codec(INTEGER_MAX)
    if annotation is bytes:
        return _bytes_codec(0, INTEGER_MAX, exact=False)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum_codec(annotation)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _dataclass_codec(annotation)
    raise LocalProtocolError(f"no wire form for {annotation!r}")


def _bounded_codec(base: Any, bounds: list[Any]) -> _Codec:
    """Return the codec of an ``Annotated`` type."""
    (bound,) = bounds
    if typing.get_origin(base) is tuple and isinstance(bound, CountMax):
        item, ellipsis = typing.get_args(base)
        assert ellipsis is Ellipsis
        return _array_codec(_codec_of(item), bound.count)
    if base is str and isinstance(bound, SizeMax):
        return _text_codec(bound.size_bytes)
    if base is bytes and isinstance(bound, (SizeMax, SizeExact)):
        return _bytes_codec(0, bound.size_bytes, exact=isinstance(bound, SizeExact))
    raise LocalProtocolError(f"no wire form for {base!r} bounded by {bound!r}")


def _read_kind(reader: CanonicalReader, expected: Kind) -> int:
    kind, argument = reader.read_head()
    if kind is not expected:
        raise RemoteProtocolError("schema", f"{kind.name} where {expected.name} is due")
    return argument


def _int_codec() -> _Codec:
    def write(value: Any) -> Any:
        if type(value) is not int or not 0 <= value <= INTEGER_MAX:
            raise LocalProtocolError(f"{value!r} is not an integer of 0..2**63-1")
        return value

    def read(reader: CanonicalReader) -> int:
        value = _read_kind(reader, Kind.INT)
        if not 0 <= value <= INTEGER_MAX:
            raise RemoteProtocolError("schema", f"integer {value} outside 0..2**63-1")
        return value

    return _Codec(write, read)


def _bool_codec() -> _Codec:
    def write(value: Any) -> Any:
        if type(value) is not bool:
            raise LocalProtocolError(f"{value!r} is not a boolean")
        return value

    return _Codec(write, lambda reader: bool(_read_kind(reader, Kind.BOOL)))


def _text_codec(size_bytes_max: int) -> _Codec:
    def write(value: Any) -> Any:
        if not isinstance(value, str):
            raise LocalProtocolError(f"{value!r} is not text")
        try:
            size_bytes = len(value.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise LocalProtocolError(f"{value!r} has no UTF-8 form") from error
        if size_bytes > size_bytes_max:
            raise LocalProtocolError(f"text of {size_bytes} bytes, at most {size_bytes_max} allowed")
        return str(value)

    def read(reader: CanonicalReader) -> str:
        size_bytes = _read_kind(reader, Kind.STR)
        if size_bytes > size_bytes_max:
            raise RemoteProtocolError("schema", f"text of {size_bytes} bytes, at most {size_bytes_max} allowed")
        return reader.read_text_body(size_bytes)

    return _Codec(write, read)


def _enum_codec(enum: type[StrEnum]) -> _Codec:
    values = {str(member.value): member for member in enum}

    def write(value: Any) -> Any:
        if value not in values:
            raise LocalProtocolError(f"{value!r} is not a {enum.__name__}")
        return str(value)

    text = _text_codec(max(map(len, values)))

    def read(reader: CanonicalReader) -> StrEnum:
        value: str = text.read(reader)
        if value not in values:
            raise RemoteProtocolError("schema", f"{value!r} is not a {enum.__name__}")
        return values[value]

    return _Codec(write, read)


def _bytes_codec(size_bytes_min: int, size_bytes_max: int, *, exact: bool) -> _Codec:
    if exact:
        size_bytes_min = size_bytes_max

    def complaint(size_bytes: int) -> str:
        return f"{size_bytes} bytes, {'exactly' if exact else 'at most'} {size_bytes_max} allowed"

    def write(value: Any) -> Any:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise LocalProtocolError(f"{type(value).__name__} is not bytes")
        view = memoryview(value)
        if not size_bytes_min <= view.nbytes <= size_bytes_max:
            raise LocalProtocolError(complaint(view.nbytes))
        return value

    def read(reader: CanonicalReader) -> bytes:
        size_bytes = _read_kind(reader, Kind.BIN)
        if not size_bytes_min <= size_bytes <= size_bytes_max:
            raise RemoteProtocolError("schema", complaint(size_bytes))
        return reader.read_body(size_bytes)

    return _Codec(write, read)


def _optional_codec(inner: _Codec) -> _Codec:
    def write(value: Any) -> Any:
        return None if value is None else inner.write(value)

    def read(reader: CanonicalReader) -> Any:
        return None if reader.take_nil() else inner.read(reader)

    return _Codec(write, read)


def _array_codec(item: _Codec, count_max: int) -> _Codec:
    def write(value: Any) -> Any:
        if not isinstance(value, tuple):
            raise LocalProtocolError(f"{type(value).__name__} is not a tuple")
        if len(value) > count_max:
            raise LocalProtocolError(f"{len(value)} items, at most {count_max} allowed")
        return [item.write(element) for element in value]

    def read(reader: CanonicalReader) -> tuple[Any, ...]:
        count = _read_kind(reader, Kind.ARRAY)
        if count > count_max:
            raise RemoteProtocolError("schema", f"{count} items, at most {count_max} allowed")
        reader.enter()
        items = tuple([item.read(reader) for _ in range(count)])
        reader.leave()
        return items

    return _Codec(write, read)


def _fixed_tuple_codec(items: list[_Codec]) -> _Codec:
    def write(value: Any) -> Any:
        if not isinstance(value, tuple) or len(value) != len(items):
            raise LocalProtocolError(f"{value!r} has not {len(items)} items")
        return [item.write(element) for item, element in zip(items, value, strict=True)]

    def read(reader: CanonicalReader) -> tuple[Any, ...]:
        count = _read_kind(reader, Kind.ARRAY)
        if count != len(items):
            raise RemoteProtocolError("schema", f"{count} items, exactly {len(items)} allowed")
        reader.enter()
        values = tuple([item.read(reader) for item in items])
        reader.leave()
        return values

    return _Codec(write, read)


def _version_codec() -> _Codec:
    pair = _fixed_tuple_codec([_int_codec(), _int_codec()])

    def write(value: Any) -> Any:
        if not isinstance(value, ids.Version):
            raise LocalProtocolError(f"{value!r} is not a version")
        return pair.write((value.epoch, value.number))

    return _Codec(write, lambda reader: ids.Version(*pair.read(reader)))


def _dataclass_codec(cls: type[Any]) -> _Codec:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = sorted(field.name for field in dataclasses.fields(cls))
    writers = [(name, _codec_of(hints[name])) for name in names]
    readers = {name.encode(): (name, codec.read) for name, codec in writers}
    required = [field.name for field in dataclasses.fields(cls) if "later" not in field.metadata]

    def write(value: Any) -> Any:
        if type(value) is not cls:
            raise LocalProtocolError(f"{type(value).__name__} is not a {cls.__name__}")
        return {name: codec.write(getattr(value, name)) for name, codec in writers}

    def read(reader: CanonicalReader) -> Any:
        count = _read_kind(reader, Kind.MAP)
        reader.enter()
        values: dict[str, Any] = {}
        key = None
        for _ in range(count):
            key = reader.read_key(key)
            known = readers.get(key)
            if known is None:
                reader.skip()
            else:
                values[known[0]] = known[1](reader)
        reader.leave()
        missing = [name for name in required if name not in values]
        if missing:
            raise RemoteProtocolError("schema", f"{cls.__name__} lacks {missing}")
        return cls(**values)

    return _Codec(write, read)
