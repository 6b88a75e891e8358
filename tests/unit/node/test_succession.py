"""Numbers are never used twice, whoever published before and whatever was lost."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.records import EpochRecord, Head
from pulsenet.chain.signing import decode_signed, encode_signed, open_record
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, Version
from pulsenet.node.published import PublishedState
from pulsenet.node.scribe import Scribe
from pulsenet.node.succession import CLOCK_MARGIN_MS, Standing, Succession, judge_head
from pulsenet.wire.schema import INTEGER_MAX

TABLE = Digest(b"t" * 32)


def state_at(run: Any, version: Version, root: str | None = None, epoch_record: bytes | None = None) -> PublishedState:
    """A committed state with nothing else retained."""
    name = run.digest(root or f"root {version}")
    return PublishedState(version, name, TABLE, name, name, epoch_record, version.number, 10, 5, 1, (), (name,))


def succession_of(run: Any, trust: Any) -> Succession:
    return Succession(trust, run.verify, Scribe(trust, run.publisher.peer_id, run.publisher.sign))


def read_head(run: Any, record: bytes) -> Head:
    return open_record(Head, decode_signed(record), run.verify, run_id=run.run_id)


def read_epoch(run: Any, signed: Any) -> EpochRecord:
    return open_record(EpochRecord, signed, run.verify, run_id=run.run_id)


def test_a_first_publisher_starts_epoch_0_at_number_1(run: Any) -> None:
    succession = succession_of(run, run.trust())
    assert succession.compare_at_start(None, run.start_ms)
    assert succession.find_epoch_reason(None, TABLE) == ""
    assert succession.choose_version(None, "") == (Version(0, 1), None)


def test_the_next_number_follows_while_the_own_state_is_the_newest(run: Any) -> None:
    succession = succession_of(run, run.trust())
    state = state_at(run, Version(0, 7))
    succession.read(run.head(Version(0, 6)))
    assert succession.compare_at_start(state, run.start_ms)
    assert succession.choose_version(state, succession.find_epoch_reason(state, TABLE)) == (Version(0, 8), None)


def test_a_publisher_behind_its_own_earlier_life_opens_an_epoch_above_it(run: Any) -> None:
    """A-CHAIN-4: version 58 was out, the checkpoint is of 55."""
    succession = succession_of(run, run.trust())
    state = state_at(run, Version(0, 55))
    succession.read(run.head(Version(0, 58), issued_at_ms=run.start_ms - 60_000))
    assert not succession.compare_at_start(state, run.start_ms)
    reason = succession.find_epoch_reason(state, TABLE)
    version, signed = succession.choose_version(state, reason)
    assert version == Version(1, 59)
    assert signed is not None
    record = read_epoch(run, signed)
    assert (record.epoch, record.first_number, record.reason) == (1, 59, "restart")
    assert (record.kept_version, record.kept_root) == (Version(0, 58), run.digest("root 0.58"))


def test_an_expired_head_counts_because_its_number_was_used(run: Any) -> None:
    succession = succession_of(run, run.trust())
    succession.read(run.head(Version(0, 9), issued_at_ms=run.start_ms - 86_400_000))
    assert not succession.compare_at_start(None, run.start_ms)
    assert succession.choose_version(None, "restart")[0] == Version(1, 10)


def test_a_head_of_an_epoch_not_known_here_counts_too(run: Any) -> None:
    succession = succession_of(run, run.trust())
    succession.read(run.head(Version(3, 9), epoch_digest=run.digest("epoch 3")))
    assert succession.choose_version(None, "restart")[0] == Version(4, 10)


def test_what_the_node_believed_before_a_restart_counts(run: Any) -> None:
    trust = run.trust()
    trust.accept_head(decode_signed(run.head(Version(0, 4))), run.start_ms)
    succession = succession_of(run, trust)
    assert succession.newest is not None
    assert not succession.compare_at_start(None, run.start_ms)
    assert succession.choose_version(None, "restart")[0] == Version(1, 5)


def test_the_same_number_with_another_root_is_not_the_own_state(run: Any) -> None:
    succession = succession_of(run, run.trust())
    succession.read(run.head(Version(0, 7), issued_at_ms=run.start_ms - 1))
    assert not succession.compare_at_start(state_at(run, Version(0, 7), "mine"), run.start_ms)


def test_the_head_that_is_believed_here_costs_no_signature_check_again(run: Any) -> None:
    trust = run.trust()
    record = run.head(Version(0, 7))
    expected = trust.accept_head(decode_signed(record), run.start_ms)
    succession = Succession(trust, lambda *_: False, Scribe(trust, run.publisher.peer_id, run.publisher.sign))
    assert succession.read(record) == expected
    with pytest.raises(TrustError, match="in the name of"):
        succession.read(run.head(Version(0, 8)))
    assert succession.newest == expected


@pytest.mark.parametrize("roots", [("mine", "other"), ("other", "mine")])
def test_two_roots_for_the_newest_number_are_noticed_in_any_order(run: Any, roots: tuple[str, str]) -> None:
    succession = succession_of(run, run.trust())
    for root in roots:
        succession.read(run.head(Version(0, 7), root=run.digest(root)))
    assert not succession.compare_at_start(state_at(run, Version(0, 7), "mine"), run.start_ms)


def test_two_roots_for_an_older_number_are_history(run: Any) -> None:
    succession = succession_of(run, run.trust())
    for number, root in ((7, "mine"), (7, "other"), (8, "root 0.8")):
        succession.read(run.head(Version(0, number), root=run.digest(root)))
    assert succession.compare_at_start(state_at(run, Version(0, 8)), run.start_ms)


@pytest.mark.parametrize(
    ("number", "root", "late_ms", "expected"),
    [
        (6, "root 0.6", 0, Standing.KNOWN),
        (7, "root 0.7", 100_000, Standing.KNOWN),
        (8, "root 0.8", 0, Standing.FORMER),
        (8, "root 0.8", CLOCK_MARGIN_MS, Standing.FORMER),
        (8, "root 0.8", CLOCK_MARGIN_MS + 1, Standing.LIVE),
        (7, "another", CLOCK_MARGIN_MS + 1, Standing.LIVE),
    ],
)
def test_a_head_is_ours_of_a_former_life_or_of_somebody_alive(
    run: Any, number: int, root: str, late_ms: int, expected: Standing
) -> None:
    succession = succession_of(run, run.trust())
    record = run.head(Version(0, number), issued_at_ms=run.start_ms + late_ms, root=run.digest(root))
    assert judge_head(succession.read(record), state_at(run, Version(0, 7)), run.start_ms) is expected


def test_late_news_of_a_former_life_makes_an_epoch_due_until_a_version_is_committed(run: Any) -> None:
    succession = succession_of(run, run.trust())
    state = state_at(run, Version(0, 1))
    head = succession.read(run.head(Version(0, 58), issued_at_ms=run.start_ms - 1))
    assert succession.compare_later(head, state, run.start_ms) is Standing.FORMER
    assert succession.rival is None
    assert succession.find_epoch_reason(state, TABLE) == "restart"
    succession.fulfil()
    assert succession.find_epoch_reason(state, TABLE) == ""


def test_somebody_alive_is_a_rival(run: Any) -> None:
    succession = succession_of(run, run.trust())
    head = succession.read(run.head(Version(0, 2), issued_at_ms=run.start_ms + 60_000))
    assert succession.compare_later(head, state_at(run, Version(0, 1)), run.start_ms) is Standing.LIVE
    assert succession.rival == head


def test_another_table_needs_an_epoch(run: Any) -> None:
    succession = succession_of(run, run.trust())
    state = state_at(run, Version(0, 7))
    assert succession.find_epoch_reason(state, Digest(b"u" * 32)) == "table"
    version, signed = succession.choose_version(state, "table")
    assert version == Version(1, 8)
    assert signed is not None
    assert read_epoch(run, signed).kept_version == Version(0, 7)


def test_an_empty_epoch_that_the_owner_opened_is_used(run: Any) -> None:
    trust = run.trust()
    opened = run.epoch(4, 100)
    trust.accept_epoch(opened)
    succession = succession_of(run, trust)
    state = state_at(run, Version(0, 7))
    assert succession.find_epoch_reason(state, TABLE) == "opened"
    assert succession.may_open(state)
    assert succession.choose_version(state, "opened") == (Version(4, 100), opened)
    later = state_at(run, Version(4, 100), epoch_record=encode_signed(opened))
    assert succession.find_epoch_reason(later, TABLE) == ""
    assert succession.choose_version(later, "") == (Version(4, 101), None)


def test_a_fork_of_the_epoch_in_force_needs_the_next_one(run: Any) -> None:
    trust = run.trust()
    first, second = (decode_signed(run.head(Version(0, 7), root=run.digest(root))) for root in ("a", "b"))
    trust.accept_fork_proof(first, second)
    succession = succession_of(run, trust)
    state = state_at(run, Version(0, 7), "a")
    assert succession.find_epoch_reason(state, TABLE) == "fork"
    assert succession.choose_version(state, "fork")[0] == Version(1, 8)


def test_one_key_of_three_may_go_on_but_not_open_an_epoch(make_run: Any) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second, make_run.third))
    succession = succession_of(run, run.trust())
    assert not succession.may_open(state_at(run, Version(0, 7)))


@pytest.mark.parametrize("case", ["stranger", "other run", "forged", "another type"])
def test_what_no_publisher_of_this_run_signed_does_not_count(run: Any, make_run: Any, case: str) -> None:
    record = {
        "stranger": run.head(Version(0, 9), key=run.stranger),
        "other run": make_run(name="other").head(Version(0, 9)),
        "forged": bytes([*(head := run.head(Version(0, 9)))[:-1], head[-1] ^ 1]),
        "another type": run.have(run.publisher),
    }[case]
    succession = succession_of(run, run.trust())
    with pytest.raises((TrustError, RemoteProtocolError)):
        succession.read(record)
    assert succession.newest is None


def test_a_rival_whose_key_was_revoked_is_none_and_its_numbers_are_passed_over(make_run: Any) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second))
    trust = run.trust()
    succession, state = succession_of(run, trust), state_at(run, Version(0, 1))
    head = succession.read(run.head(Version(0, 5), key=run.second, issued_at_ms=run.start_ms + 60_000))
    assert succession.compare_later(head, state, run.start_ms) is Standing.LIVE
    assert succession.rival == head
    trust.accept_descriptor(run.revise(authorities=(run.publisher.peer_id,)))
    assert succession.rival is None
    reason = succession.find_epoch_reason(state, TABLE)
    assert reason == "revocation"
    assert succession.choose_version(state, reason)[0] == Version(1, 6)
    succession.fulfil()
    assert succession.find_epoch_reason(state, TABLE) == ""


def test_a_leaked_key_that_used_the_last_number_is_passed_by_where_the_owners_say_so(make_run: Any) -> None:
    """The fast-forward attack: nothing follows 2**63 - 1, and nobody falls over it."""
    run = make_run(authorities=(make_run.publisher, make_run.second))
    trust = run.trust()
    succession, state = succession_of(run, trust), state_at(run, Version(0, 57))
    succession.read(run.head(Version(0, INTEGER_MAX), key=run.second, issued_at_ms=run.start_ms - 60_000))
    assert not succession.compare_at_start(state, run.start_ms)
    trust.accept_descriptor(run.revise(authorities=(run.publisher.peer_id,)))
    assert not succession.may_open(state)
    trust.accept_epoch(run.epoch(1, 58, Version(0, 57), revision=1))
    assert succession.newest is None
    assert succession.may_open(state)
    assert succession.choose_version(state, "opened")[0] == Version(1, 58)


def test_an_epoch_that_somebody_opened_is_entered_with_the_next_version(run: Any) -> None:
    trust = run.trust()
    succession = succession_of(run, trust)
    state = state_at(run, Version(0, 7))
    fields = {"kept_version": Version(0, 7), "kept_root": state.root, "first_number": 8, "reason": "restart"}
    trust.accept_epoch(run.seal(EpochRecord(run_id=run.run_id, revision=0, epoch=1, **fields), run.publisher))
    assert succession.find_epoch_reason(state, TABLE) == "opened"
    assert succession.choose_version(state, "opened")[0] == Version(1, 8)


def test_a_rival_nobody_read_is_none(run: Any) -> None:
    succession = succession_of(run, run.trust())
    state = state_at(run, Version(0, 7))
    head = read_head(run, run.head(Version(0, 9), issued_at_ms=run.start_ms + CLOCK_MARGIN_MS + 1))
    assert succession.compare_later(head, state, run.start_ms) is Standing.LIVE
    assert succession.rival is None


def test_an_epoch_whose_signer_was_revoked_is_gone_on_from_in_another(run: Any) -> None:
    trust = run.trust()
    order = EpochRecord(run.run_id, 0, 1, None, None, 8, "restart")
    trust.accept_epoch(run.seal(order, run.publisher))
    trust.accept_descriptor(run.revise(authorities=(run.second.peer_id,)))
    succession = Succession(trust, run.verify, Scribe(trust, run.second.peer_id, run.second.sign))
    assert succession.find_epoch_reason(state_at(run, Version(1, 8)), TABLE) == "endorsement"
