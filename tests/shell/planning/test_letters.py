"""Letters without a font."""

from __future__ import annotations

import string

import numpy as np

from pulsenetd.planning.letters import LETTER_HEIGHT, LETTER_WIDTH, letter

PRINTED = string.ascii_uppercase + string.digits + ".,:%/()*_-=+ "


def test_every_letter_fits_its_box_and_no_two_look_alike() -> None:
    shapes = [letter(character) for character in PRINTED]
    assert {shape.shape for shape in shapes} == {(LETTER_HEIGHT, LETTER_WIDTH)}
    assert len({shape.tobytes() for shape in shapes}) == len(PRINTED)


def test_small_letters_are_capitals_and_strange_ones_a_box() -> None:
    assert np.array_equal(letter("q"), letter("Q"))
    assert letter("é")[0].all()


def test_dots_run_from_the_left() -> None:
    assert letter("L")[:, 0].all()
    assert letter("L")[-1].all()
    assert not letter("L")[:-1, 1:].any()
