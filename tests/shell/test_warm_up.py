"""The warm-up runs the real codec."""

from __future__ import annotations

from pulsenetd.warm_up import ELEMENTS, warm_up


def test_every_kind_of_tensor_is_encoded_and_decoded() -> None:
    assert warm_up() == 3 * len(range(7, ELEMENTS, 97))
