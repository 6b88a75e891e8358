import numpy as np

from pulsenet.codec.values import join_steps, join_steps_twin, split_steps, split_steps_twin

ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def u16(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


def test_neighbours_are_one_bit_and_the_rest_exceptions() -> None:
    old = u16(0x3F80, 0x3F80, 0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80)
    new = u16(0x3F81, 0x3F7F, 0x8000, 0x0000, 0x4080, 0xBF81, 0x7F81)
    for split in (split_steps, split_steps_twin):
        ups, exceptions = split(old, new)
        assert ups.tolist() == [0b1001001]  # up, down, down (+0 to -0), up, exception, down (more negative), up
        assert exceptions.tolist() == [4]


def test_steps_wrap_between_the_largest_and_the_smallest_pattern() -> None:
    for split in (split_steps, split_steps_twin):
        ups, exceptions = split(u16(0x7FFF, 0xFFFF), u16(0xFFFF, 0x7FFF))
        assert (ups.tolist(), exceptions.size) == ([0b01], 0)


def test_every_pattern_steps_both_ways_and_back() -> None:
    for fill in (0x00, 0xFF):
        ups = np.full(ALL_BITS.size // 8, fill, np.uint8)
        stepped = join_steps(ALL_BITS, ups)
        assert np.array_equal(stepped, join_steps_twin(ALL_BITS, ups))
        found, exceptions = split_steps(ALL_BITS, stepped)
        assert np.array_equal(found, ups)
        assert exceptions.size == 0
        assert np.array_equal(join_steps(stepped, ~ups), ALL_BITS)


def test_nothing_splits_and_joins_to_nothing() -> None:
    ups, exceptions = split_steps(u16(), u16())
    assert (ups.size, exceptions.size, join_steps(u16(), ups).size) == (0, 0, 0)
