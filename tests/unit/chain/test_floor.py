"""Whose word binds a node that knows what the owners ordered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.floor import find_binding, is_owners_word, may_open_epoch, outlives


def test_owners_speak_by_threshold_and_authorities_by_majority(run: Any) -> None:
    owner, publisher, second, stranger = (key.peer_id for key in (run.owner, run.publisher, run.second, run.stranger))
    assert is_owners_word(run.descriptor, (owner,))
    assert not is_owners_word(run.descriptor, (publisher, second, stranger))
    assert may_open_epoch(run.descriptor, (owner,))
    assert may_open_epoch(run.descriptor, (publisher, second))
    assert not may_open_epoch(run.descriptor, (publisher, stranger))
    two = replace(run.descriptor, owners=tuple(sorted((owner, stranger))), owner_threshold=2)
    assert not is_owners_word(two, (owner,))
    assert is_owners_word(two, (owner, stranger))


@pytest.mark.parametrize(
    ("revision", "key", "binds"), [(0, "publisher", True), (0, "stranger", False), (1, "stranger", True)]
)
def test_only_what_revoked_keys_said_before_the_order_ends_with_it(
    run: Any, revision: int, key: str, binds: bool
) -> None:
    order = run.epoch(1, 58, revision=1)
    assert outlives(run.descriptor, order, revision, (getattr(run, key).peer_id,)) is binds


def test_heads_and_epochs_are_judged_alike(run: Any) -> None:
    order = run.epoch(3, 58, revision=1)
    head = (run.head(99), run.sign(run.head(99), run.stranger))
    good, bad = run.epoch(1, 4), run.epoch(2, 9)
    epochs = ((good, run.sign(good, run.publisher, run.second)), (bad, run.sign(bad, run.publisher, run.stranger)))
    assert find_binding(run.descriptor, order, head, epochs) == (None, epochs[:1])
    kept = (run.head(99), run.sign(run.head(99), run.publisher))
    assert find_binding(run.descriptor, order, kept, ()) == (kept, ())
    assert find_binding(run.descriptor, order, None, ()) == (None, ())


def test_what_every_key_of_the_run_signed_binds(run: Any) -> None:
    everybody = (*run.descriptor.owners, *run.descriptor.authorities)
    assert outlives(run.descriptor, run.epoch(1, 58, revision=1), 0, everybody)
