import tracemalloc

import numpy as np
import pytest
import zstandard

from pulsenet.codec.compress import PlaneEncoder, PlaneReader, join_bytes, split_bytes
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import RemoteProtocolError


def read(data: bytes, size_min: int, size_max: int) -> bytes:
    reader = PlaneReader(data)
    plane = reader.read_plane(size_min=size_min, size_max=size_max)
    reader.expect_end()
    return plane.tobytes()


def framed(frame: bytes) -> bytes:
    return encode_varint(len(frame) << 1 | 1) + frame


def compress(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("kind", ["zeros", "random"])
def test_plane_comes_back_and_costs_at_most_its_size_and_head(size: int, kind: str) -> None:
    raw = np.zeros(size, np.uint8) if kind == "zeros" else np.random.default_rng(1).integers(0, 256, size, np.uint8)
    encoded = PlaneEncoder().encode(raw)
    assert len(encoded) <= size + 2
    assert read(encoded, size, size) == raw.tobytes()


def test_long_plain_runs_are_compressed_and_short_ones_are_not() -> None:
    encoded = PlaneEncoder().encode(np.zeros(100_000, np.uint8))
    assert len(encoded) < 40
    assert not zstandard.get_frame_parameters(encoded[1:]).has_checksum
    assert PlaneEncoder().encode(np.zeros(31, np.uint8)) == bytes([62]) + bytes(31)


@pytest.mark.parametrize("size", [9, 13])
def test_raw_plane_of_another_size_is_refused(size: int) -> None:
    assert read(bytes([11 << 1]) + bytes(11), 10, 12) == bytes(11)
    with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
        read(bytes([size << 1]) + bytes(size), 10, 12)


def test_a_frame_of_one_byte_is_read() -> None:
    assert read(framed(compress(b"x")), 0, 10) == b"x"


def test_frame_stating_another_size_is_refused_before_it_is_opened() -> None:
    """A-MSG-3: 8,211 bytes that hold 256 MiB of zeros, where at most 1 MiB is due."""
    bomb = framed(compress(bytes(256 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="268435456"):
            read(bomb, 0, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frame_lying_about_its_size_stops_at_that_size() -> None:
    """A-MSG-3: the header says 1 MiB, the blocks go on to 256 MiB."""
    honest = compress(bytes(256 << 20))
    assert zstandard.get_frame_parameters(honest).content_size == 256 << 20
    start = honest.index((256 << 20).to_bytes(4, "little"))
    lying = honest[:start] + (1 << 20).to_bytes(4, "little") + honest[start + 4 :]
    assert zstandard.get_frame_parameters(lying).content_size == 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="damaged frame"):
            read(framed(lying), 0, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_thirteen_byte_frame_is_a_handled_error() -> None:
    """A-MSG-4: unguarded, this one surfaces as MemoryError."""
    with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
        read(framed(bytes.fromhex("28b52ffde06c06060663636363")), 0, 1 << 20)


def test_memory_error_never_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def decompress(self, frame: memoryview, **options: bool) -> bytes:
            raise MemoryError

    reader = PlaneReader(framed(compress(bytes(100))))
    monkeypatch.setattr(reader, "_decompressor", Exhausted())
    with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
        reader.read_plane(size_min=100, size_max=100)


@pytest.mark.parametrize("size", [0, 99, 101])
def test_decompressed_size_is_checked_again(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    class Short:
        def decompress(self, frame: memoryview, **options: bool) -> bytes:
            return bytes(size)

    reader = PlaneReader(framed(compress(bytes(100))))
    monkeypatch.setattr(reader, "_decompressor", Short())
    with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
        reader.read_plane(size_min=100, size_max=100)


@pytest.mark.parametrize(
    "frame",
    [
        compress(bytes(100)) + b"junk",
        compress(bytes(100)) + compress(b""),
        compress(bytes(100)) * 2,
        compress(bytes(100))[:-1],
        compress(bytes(100), write_content_size=False),
        compress(b""),
        bytes.fromhex("502a4d1864000000") + bytes(100),
        b"",
        b"\x28\xb5\x2f\xfd",
        bytes(20),
    ],
    ids=["junk", "empty-after", "twice", "cut", "unsized", "empty", "skippable", "nothing", "magic", "zeros"],
)
def test_trailing_cut_and_foreign_frames_are_refused(frame: bytes) -> None:
    """A-MSG-5."""
    with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
        read(framed(frame), 0, 200)


def test_frame_asking_for_a_huge_window_is_refused() -> None:
    def frame(window_log: int, eighths: int = 0) -> bytes:
        # Content size 300 as two bytes less 256; one last block repeats one byte 300 times.
        head = b"\x28\xb5\x2f\xfd\x40" + bytes([(window_log - 10) << 3 | eighths]) + (300 - 256).to_bytes(2, "little")
        return head + (300 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\x07"

    # 8 MiB is the most.
    for allowed in (frame(20), frame(23)):
        assert read(framed(allowed), 300, 300) == b"\x07" * 300
    for refused in (frame(23, eighths=1), frame(29)):
        with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
            read(framed(refused), 300, 300)


def test_frame_that_needs_a_dictionary_is_refused() -> None:
    samples = [bytes([number % 7, number % 11]) * 40 for number in range(300)]
    dictionary = zstandard.train_dictionary(1024, samples)
    frame = zstandard.ZstdCompressor(level=1, dict_data=dictionary).compress(samples[0])
    with pytest.raises(RemoteProtocolError, match=r"^patch-plane:"):
        read(framed(frame), 0, 200)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_byte_planes_start_with_the_least_significant_byte(dtype: type) -> None:
    width = np.dtype(dtype).itemsize
    bits = np.frombuffer(bytes(range(width * 5)), np.dtype(dtype).newbyteorder("<"))
    planes = split_bytes(bits)
    assert [plane.tolist() for plane in planes] == [list(range(start, width * 5, width)) for start in range(width)]
    assert np.array_equal(join_bytes(planes), bits)
    reader = PlaneReader(PlaneEncoder().encode_integers(bits))
    assert np.array_equal(reader.read_integers(size_bytes=width, count=5), bits)
