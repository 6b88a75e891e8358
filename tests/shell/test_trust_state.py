"""Beliefs outlive a restart; a state that cannot be used is said aloud (A-AUTH-7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.errors import ConfigError, TrustError
from pulsenet.ids import RunId, Version
from pulsenet.node.news import TRUST_KEY
from pulsenetd.identity import verify
from pulsenetd.storage.store import Store
from pulsenetd.trust_state import open_trust, refuse_other_run


def test_the_first_start_believes_the_token_and_nothing_else(store: Store, run: Any) -> None:
    trust = open_trust(store, run.token, verify)
    assert (trust.run_id, trust.descriptor, trust.head) == (run.run_id, None, None)
    trust.accept_descriptor(run.genesis)
    late = open_trust(store, replace(run.token, revision_min=3), verify)
    late.accept_descriptor(run.genesis)
    with pytest.raises(TrustError, match="revision 3 is due"):
        late.accept_head(run.news(1).head, run.now_ms)


def test_what_was_believed_is_believed_again(store: Store, run: Any) -> None:
    trust = run.trust()
    trust.accept_head(run.news(2).head, run.now_ms)
    store.save_state(TRUST_KEY, trust.save())
    again = open_trust(store, run.token, verify)
    assert again.head == trust.head
    with pytest.raises(TrustError, match="rollback"):
        again.accept_head(run.news(1).head, run.now_ms)


@pytest.mark.parametrize("case", ["damaged", "another run"])
def test_a_lost_state_is_said_and_the_token_is_what_is_left(
    store: Store, run: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A-AUTH-7"""
    state = run.trust().save()
    store.save_state(TRUST_KEY, state[:-1] if case == "damaged" else state)
    run_id = run.run_id if case == "damaged" else RunId(b"x" * 32)
    trust = open_trust(store, replace(run.token, run_id=run_id), verify)
    assert (trust.run_id, trust.descriptor) == (run_id, None)
    assert "the stored trust state cannot be used" in caplog.text


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_operators_minimum_holds_with_and_without_a_saved_state(store: Store, run: Any, is_saved: bool) -> None:
    """A-AUTH-7: a node that lost its state is told what it had."""
    if is_saved:
        store.save_state(TRUST_KEY, run.trust().save())
    trust = open_trust(store, run.token, verify, Version(0, 50))
    trust.accept_descriptor(run.genesis)
    with pytest.raises(TrustError, match=r"0\.50 is known"):
        trust.accept_head(run.news(41).head, run.now_ms)
    trust.accept_head(run.news(51).head, run.now_ms)


def test_a_directory_of_another_run_is_refused_by_name(store: Store, run: Any) -> None:
    """It would go on with the other run's descriptors, and say that nothing leads to this one."""
    refuse_other_run(store, run.token)
    store.put_record(run.genesis)
    refuse_other_run(store, run.token)
    with pytest.raises(ConfigError, match="holds a node of another run"):
        refuse_other_run(store, replace(run.token, run_id=RunId(b"x" * 32)))
