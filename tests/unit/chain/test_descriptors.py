"""The chain of revisions from the genesis to the newest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.descriptors import DescriptorChain
from pulsenet.chain.signing import record_digest
from pulsenet.errors import TrustError


@pytest.fixture
def chain(run: Any, real_verify: Any) -> DescriptorChain:
    chain = DescriptorChain(run.run_id, real_verify, 0)
    chain.accept(run.genesis)
    return chain


def code_of(chain: DescriptorChain, signed: Any) -> str:
    newest = chain.newest
    with pytest.raises(TrustError) as caught:
        chain.accept(signed)
    assert chain.newest is newest
    return caught.value.code


def test_the_genesis_is_trusted_because_the_run_id_is_its_digest(
    run: Any, real_verify: Any, make_run: Callable[..., Any]
) -> None:
    chain = DescriptorChain(run.run_id, real_verify, 0)
    assert chain.digest is None
    assert chain.next_revision == 0
    assert code_of(chain, make_run(name="other").genesis) == "wrong-run"
    assert chain.accept(run.genesis) == run.descriptor
    assert chain.digest == run.run_id


def test_revisions_are_walked_in_order(run: Any, chain: DescriptorChain) -> None:
    first = run.revise(run.genesis, run.descriptor, trainers=())
    assert chain.next_revision == 1
    revised = chain.accept(first)
    second = run.revise(first, revised, name="renamed")
    assert chain.accept(second).name == "renamed"
    assert chain.accept(second) is chain.newest
    assert chain.record == second
    assert code_of(chain, first) == "rollback"
    assert code_of(chain, run.genesis) == "rollback"


def test_a_gap_asks_for_what_lies_between(run: Any, chain: DescriptorChain, real_verify: Any) -> None:
    first = run.revise(run.genesis, run.descriptor)
    second = run.revise(first, replace(run.descriptor, revision=1))
    assert code_of(chain, second) == "revision-gap"
    assert code_of(DescriptorChain(run.run_id, real_verify, 0), first) == "revision-gap"


def test_a_second_revision_of_one_number_is_refused(run: Any, chain: DescriptorChain) -> None:
    chain.accept(run.revise(run.genesis, run.descriptor, name="one"))
    assert code_of(chain, run.revise(run.genesis, run.descriptor, name="two")) == "rollback"


def test_only_the_owners_before_sign_a_revision(run: Any, chain: DescriptorChain) -> None:
    for key in (run.publisher, run.stranger):
        assert code_of(chain, run.revise(run.genesis, run.descriptor, key)) == "untrusted"
    assert code_of(chain, run.revise(run.genesis, run.descriptor, run.owner, run.stranger)) == "untrusted"


def test_new_owners_sign_only_after_the_old_named_them(run: Any, chain: DescriptorChain) -> None:
    owners = (run.stranger.peer_id,)
    assert code_of(chain, run.revise(run.genesis, run.descriptor, run.stranger, owners=owners)) == "untrusted"
    first = run.revise(run.genesis, run.descriptor, owners=owners)
    revised = chain.accept(first)
    assert code_of(chain, run.revise(first, revised, run.owner)) == "untrusted"
    chain.accept(run.revise(first, revised, run.stranger))


def test_the_threshold_of_the_revision_before_counts(run: Any, chain: DescriptorChain) -> None:
    owners = tuple(sorted((run.owner.peer_id, run.stranger.peer_id)))
    first = run.revise(run.genesis, run.descriptor, owners=owners, owner_threshold=2)
    revised = chain.accept(first)
    assert code_of(chain, run.revise(first, revised, run.owner)) == "untrusted"
    chain.accept(run.revise(first, revised, run.owner, run.stranger, owner_threshold=1))


def test_a_revision_names_the_one_before_and_keeps_the_nonce(run: Any, chain: DescriptorChain) -> None:
    astray = replace(run.descriptor, revision=1, previous=record_digest(run.signed_head(1)))
    assert code_of(chain, run.sign(astray, run.owner)) == "mismatch"
    renamed = run.revise(run.genesis, run.descriptor, nonce=b"0123456789abcdef")
    assert code_of(chain, renamed) == "mismatch"


def test_require_waits_for_the_tokens_minimum(run: Any, real_verify: Any) -> None:
    chain = DescriptorChain(run.run_id, real_verify, 1)
    for signed in (None, run.genesis):
        if signed is not None:
            chain.accept(signed)
        known = "none" if signed is None else "0"
        with pytest.raises(TrustError, match=f"^revision-unknown: revision 1 is due, {known} is known$"):
            chain.require()
    chain.accept(run.revise(run.genesis, run.descriptor))
    assert chain.require().revision == 1
