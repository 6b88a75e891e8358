import numpy as np
import pytest

from pulsenet.codec import rice


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def plans_of(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(len(rows), rice.PLAN_COLUMNS)


@pytest.mark.parametrize(
    ("values", "parameter", "bits"),
    [
        ([0], 0, "1"),
        ([3], 0, "0001"),
        ([5], 1, "001" + "1"),
        ([5], 2, "01" + "10"),
        ([0, 6, 1], 2, "100" + "0101" + "110"),
        ([9], 3, "01" + "100"),
        ([], 5, ""),
    ],
)
def test_code_is_zeros_a_one_and_the_low_bits_from_the_lowest(values: list[int], parameter: int, bits: str) -> None:
    for write in (rice.write_codes, rice.write_codes_twin):
        out = np.zeros(4, np.uint8)
        assert write(u32(*values), parameter, out, 3) == 3 + len(bits)
        assert "".join(map(str, np.unpackbits(out, bitorder="little")[3 : 3 + len(bits)])) == bits
    for read in (rice.read_codes, rice.read_codes_twin):
        found = np.zeros(len(values), np.uint32)
        assert read(out, 3, parameter, 9, found) == 3 + len(bits)
        assert found.tolist() == values


@pytest.mark.parametrize("start_bit", [0, 1, 7, 8, 13])
@pytest.mark.parametrize("parameter", [0, 1, 5, 8, 20, 31])
def test_numbers_of_every_width_come_back(start_bit: int, parameter: int) -> None:
    numbers = [(1 << width) - less for width in range(33) for less in (0, 1) if (1 << width) - less < 1 << 32]
    values = u32(*[number for number in numbers if number >> parameter <= 300])
    size_bits = int((values >> np.uint32(parameter)).sum()) + values.size * (parameter + 1)
    for write, read in (
        (rice.write_codes, rice.read_codes_twin),
        (rice.write_codes_twin, rice.read_codes),
    ):
        out = np.zeros(-(-(start_bit + size_bits) // 8), np.uint8)
        assert write(values, parameter, out, start_bit) == start_bit + size_bits
        found = np.zeros(values.size, np.uint32)
        assert read(out, start_bit, parameter, (1 << 32) - 1, found) == start_bit + size_bits
        assert np.array_equal(found, values)


@pytest.mark.parametrize(
    "values",
    [
        [0],
        [0, 0, 0],
        [1, 1, 1, 1],
        [1 << 20],
        [0, 0, 0, 0, 1 << 20],
        [(1 << 32) - 1] * 3,
        list(range(100)),
        [2, 2, 3, 4],
        [0, 1000, 0, 1000],
        # Larger than the mean suggests, by one from an even parameter and from an odd one.
        [1, 3, 1, 3, 1],
        [2, 6, 2, 6, 2],
        [],
    ],
)
def test_parameter_is_the_smallest_of_the_best(values: list[int]) -> None:
    assert rice.choose_parameter(u32(*values)) == rice.choose_parameter_twin(u32(*values))


def test_largest_numbers_take_the_largest_parameter() -> None:
    for choose in (rice.choose_parameter, rice.choose_parameter_twin):
        assert choose(u32((1 << 32) - 1)) == (31, 33)


def test_best_parameter_of_a_thousand_draws_is_found_for_every_mean() -> None:
    generator = np.random.default_rng(1)
    for mean in (0.01, 0.3, 1, 2, 5, 20, 170, 5000, 200_000):
        values = generator.geometric(1 / (1 + mean), 1000).astype(np.uint32) - np.uint32(1)
        assert rice.choose_parameter(values) == rice.choose_parameter_twin(values)


@pytest.mark.parametrize(
    ("data", "start_bit", "parameter", "value_max", "outcome"),
    [
        ([], 0, 0, 9, -1),
        ([0], 0, 0, 9, -1),
        ([0, 0, 0], 5, 0, 99, -1),
        ([0x80], 0, 0, 9, 8),
        ([0x80], 0, 1, 99, -1),
        ([0x80, 0x01], 0, 1, 99, 9),
        ([0x00, 0x80], 0, 9, 1 << 30, -1),
        ([0x80], 0, 0, 6, -2),
        ([0x01], 8, 0, 9, -1),
        ([0x01], 3, 0, 9, -1),
    ],
)
def test_reader_stops_at_the_end_and_at_the_bound(
    data: list[int], start_bit: int, parameter: int, value_max: int, outcome: int
) -> None:
    for read in (rice.read_codes, rice.read_codes_twin):
        assert read(u8(*data), start_bit, parameter, value_max, np.zeros(1, np.uint32)) == outcome


def test_single_bits_are_written_and_read_where_they_belong() -> None:
    bits = u8(1, 0, 1, 1, 0, 0, 1, 1, 1)
    for write in (rice.write_bits, rice.write_bits_twin):
        out = np.zeros(2, np.uint8)
        assert write(bits, out, 6) == 15
        assert out.tolist() == [0b01000000, 0b01110011]
    for read in (rice.read_bits, rice.read_bits_twin):
        found = np.zeros(9, np.uint8)
        assert read(out, 6, found) == 15
        assert np.array_equal(found, bits)
        assert read(out, 8, found) == -1


STARTS = np.array([0, 3, 3, 8, 60], np.int64)
GAPS = np.arange(60, dtype=np.uint32) * np.uint32(7) % np.uint32(50)
UPS = (np.arange(60) % 3 == 0).astype(np.uint8)
EXTRAS = np.zeros(60, np.uint32)
EXTRAS[3:8] = (9, 12, 8, 11, 10)
EXTRAS[[9, 30, 33]] = (1, 12, 5)


def test_plan_takes_nothing_for_ones_a_list_for_few_exceptions_and_codes_for_many() -> None:
    plans, size_bits = rice.plan_stream(GAPS, EXTRAS, STARTS)
    twin_plans, twin_size_bits = rice.plan_stream_twin(GAPS, EXTRAS, STARTS)
    assert np.array_equal(plans, twin_plans)
    assert size_bits == twin_size_bits
    assert plans[:, rice.COUNT].tolist() == [3, 0, 5, 52]
    assert plans[:, rice.MODE].tolist() == [0, 0, rice.STEPS_ARE_RICE, rice.STEPS_ARE_SPARSE]
    assert plans[3, rice.EXCEPTIONS] == 3


@pytest.mark.parametrize(
    ("exceptions", "size", "count"),
    [(1, 13, 9), (127, 1, 396), (128, 1, 407), (16_383, 1, 49_172), (16_384, 1, 49_183)],
)
def test_steps_are_listed_where_that_takes_no_more_bits_than_codes(exceptions: int, size: int, count: int) -> None:
    """Exceptions spread over ``count`` steps cost as much either way, over one step less a bit more as a list."""
    for steps, mode in ((count, rice.STEPS_ARE_SPARSE), (count - 1, rice.STEPS_ARE_RICE)):
        extras = np.zeros(steps, np.uint32)
        extras[np.linspace(0, steps - 1, exceptions).astype(int)] = size
        starts = np.array([0, steps], np.int64)
        plans, size_bits = rice.plan_stream(extras, extras, starts)
        twin_plans, twin_size_bits = rice.plan_stream_twin(extras, extras, starts)
        assert np.array_equal(plans, twin_plans)
        assert size_bits == twin_size_bits
        assert plans[0, rice.MODE] == mode


def test_stream_of_whole_bytes_has_none_more() -> None:
    nothing, starts = np.zeros(4, np.uint32), np.array([0, 4], np.int64)
    plans, size_bits = rice.plan_stream(nothing, nothing, starts)
    assert size_bits == 8
    for write in (rice.write_stream, rice.write_stream_twin):
        # A one and a direction each, the ones first.
        assert write(nothing, u8(1, 0, 0, 1), nothing, starts, plans, size_bits).tolist() == [0b10011111]


def test_stream_that_ends_early_in_one_class_is_not_read_on_in_the_next() -> None:
    plans = plans_of((1, 0, rice.STEPS_ARE_RICE, 0, 0, 6), (1, 0, rice.STEPS_ARE_ONES, 0, 0, 0))
    for read in (rice.read_stream, rice.read_stream_twin):
        assert read(u8(0b10000101), plans, 3, 3)[0] == rice.ENDS_EARLY


def test_stream_comes_back_from_loop_and_twin() -> None:
    plans, size_bits = rice.plan_stream(GAPS, EXTRAS, STARTS)
    stream = rice.write_stream(GAPS, UPS, EXTRAS, STARTS, plans, size_bits)
    assert np.array_equal(stream, rice.write_stream_twin(GAPS, UPS, EXTRAS, STARTS, plans, size_bits))
    for read in (rice.read_stream, rice.read_stream_twin):
        end_bit, gaps, ups, extras = read(stream, plans, 49, 12)
        assert end_bit == size_bits
        assert np.array_equal(gaps, GAPS)
        assert np.array_equal(ups, UPS)
        assert np.array_equal(extras, EXTRAS)


def test_stream_cut_anywhere_ends_early() -> None:
    plans, size_bits = rice.plan_stream(GAPS, EXTRAS, STARTS)
    stream = rice.write_stream(GAPS, UPS, EXTRAS, STARTS, plans, size_bits)
    for size in range(stream.size):
        for read in (rice.read_stream, rice.read_stream_twin):
            assert read(stream[:size], plans, 49, 12)[0] == rice.ENDS_EARLY


@pytest.mark.parametrize(
    ("plan", "stream", "outcome"),
    [
        ((1, 0, 0, 0, 0, 0), [0b10000], rice.GAP_BEYOND),  # a gap of 4, where 3 is the most
        ((1, 0, 2, 0, 0, 0), [0b10000001], rice.SIZE_BEYOND),  # a size of 5, where 4 is the most
        ((1, 0, 1, 1, 0, 0), [0b01000101], rice.SIZE_BEYOND),  # 1 + 3 more than 1
        ((1, 0, 1, 1, 0, 0), [0b00000001], rice.ENDS_EARLY),
        ((1, 0, 1, 1, 0, 0), [0b00001001], rice.SIZE_BEYOND),  # rank 1 of 1
        ((2, 0, 1, 2, 0, 0), [0b11010011, 0b1], rice.SIZE_BEYOND),  # ranks 0 and 2 of 2
        ((1, 0, 1, 1, 0, 0), [0b00000101], rice.ENDS_EARLY),
        ((8, 0, 0, 0, 0, 0), [0b11111111], rice.ENDS_EARLY),  # no bits for the directions
        ((1, 0, 2, 0, 0, 0), [0b00000001], rice.ENDS_EARLY),
    ],
)
def test_stream_beyond_its_bounds_is_refused_by_name(plan: tuple[int, ...], stream: list[int], outcome: int) -> None:
    for read in (rice.read_stream, rice.read_stream_twin):
        assert read(u8(*stream), plans_of(plan), 3, 3)[0] == outcome
