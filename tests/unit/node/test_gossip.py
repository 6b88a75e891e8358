"""News is verified before it travels, travels once, and lies cost their sender."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, Version
from pulsenet.node.effects import Count, StrikePeer
from pulsenet.node.gossip import UNRIPE_MAX, UNRIPE_RETRIES_MAX, UNRIPE_RETRY_SECONDS, VERDICTS_MAX, Gossip
from pulsenet.node.neighbours import INCOMING_BURST, Link
from pulsenet.wire.messages import PushForkProof, PushHead

NOW = 100.0
SENDER = PeerId(b"s" * 32)
OTHER = PeerId(b"o" * 32)


@pytest.fixture
def trust(run: Any) -> Any:
    return run.trust()


@pytest.fixture
def gossip(trust: Any) -> Gossip:
    return Gossip(trust)


def link_to(peer_id: PeerId) -> Link:
    return Link(peer_id, True)


def test_a_good_head_is_for_everybody_but_its_sender(run: Any, gossip: Gossip) -> None:
    sender, other = link_to(SENDER), link_to(OTHER)
    record = run.head(Version(0, 1))
    assert gossip.take_head(record, sender, NOW, run.start_ms) == []
    assert gossip.verdict(record) == ""
    assert gossip.due_for(sender, NOW, run.start_ms) == []
    (push,) = gossip.due_for(other, NOW, run.start_ms)
    assert push.message == PushHead(record)
    other.start_push(1, push.digest)
    assert gossip.due_for(other, NOW, run.start_ms) == []


def test_a_head_from_the_directory_is_for_everybody(run: Any, gossip: Gossip) -> None:
    record = run.head(Version(0, 1))
    for _ in range(2):  # the directory shows it for as long as it is the newest
        assert gossip.take_head(record, None, NOW, run.start_ms) == []
    assert len(gossip.due_for(link_to(OTHER), NOW, run.start_ms)) == 1


def test_a_head_that_another_machine_of_this_node_accepted_travels_too(run: Any, trust: Any, gossip: Gossip) -> None:
    trust.accept_head(decode_signed(run.head(Version(0, 1))), run.start_ms)
    assert len(gossip.due_for(link_to(OTHER), NOW, run.start_ms)) == 1


def test_of_a_burst_only_the_newest_travels(run: Any, gossip: Gossip) -> None:
    for number in range(1, 20):
        gossip.take_head(run.head(Version(0, number)), None, NOW, run.start_ms)
    (push,) = gossip.due_for(link_to(OTHER), NOW, run.start_ms)
    assert push.message == PushHead(run.head(Version(0, 19)))


def test_a_newer_signature_of_the_same_version_travels(run: Any, gossip: Gossip) -> None:
    other = link_to(OTHER)
    for late_ms in (0, 40_000):
        gossip.take_head(run.head(Version(0, 1), issued_at_ms=run.start_ms + late_ms), None, NOW, run.start_ms)
        (push,) = gossip.due_for(other, NOW, run.start_ms)
        other.start_push(late_ms, push.digest)


def test_a_second_copy_is_noted_and_costs_no_verification(run: Any, gossip: Gossip) -> None:
    record = run.head(Version(0, 1))
    gossip.take_head(record, None, NOW, run.start_ms)
    sender = link_to(SENDER)
    # At this time the head would be refused as expired, so the verdict is the remembered one.
    assert gossip.take_head(record, sender, NOW, run.start_ms + 10**9) == []
    assert sender.knows(record_digest(decode_signed(record)))


@pytest.mark.parametrize(
    ("case", "code", "is_struck"),
    [
        ("stranger", "untrusted", False),
        ("older", "rollback", False),
        ("expired", "expired", False),
        ("forged", "signature", True),
        ("other run", "wrong-run", True),
        ("another type", "wrong-type", True),
        ("junk", "decode", True),
    ],
)
def test_what_is_refused_is_counted_once_and_never_forwarded(
    run: Any, make_run: Any, trust: Any, gossip: Gossip, case: str, code: str, is_struck: bool
) -> None:
    """A-AUTH-1, A-AUTH-4, A-AUTH-6, A-DHT-6."""
    trust.accept_head(decode_signed(run.head(Version(0, 5))), run.start_ms)
    good = run.head(Version(0, 9))
    record = {
        "stranger": run.head(Version(0, 9), key=run.stranger),
        "older": run.head(Version(0, 4)),
        "expired": run.head(Version(0, 9), issued_at_ms=run.start_ms - 400_000),
        "forged": good.replace(run.digest("catalogue"), run.digest("my catalogue")),
        "other run": make_run(name="other").head(Version(0, 9)),
        "another type": run.have(run.publisher),
        "junk": b"\xc1junk",
    }[case]
    effects = gossip.take_head(record, link_to(SENDER), NOW, run.start_ms)
    assert effects == [Count("rejected", code), *([StrikePeer(SENDER, code)] if is_struck else [])]
    assert gossip.verdict(record) == code
    assert gossip.take_head(record, None, NOW, run.start_ms) == [Count("rejected", code)]
    (push,) = gossip.due_for(link_to(OTHER), NOW, run.start_ms)
    assert push.message == PushHead(run.head(Version(0, 5)))


def test_a_flood_is_cut_before_its_signatures_are_checked(run: Any, gossip: Gossip) -> None:
    sender = link_to(SENDER)
    for _ in range(INCOMING_BURST):
        gossip.take_head(b"junk", sender, NOW, run.start_ms)
    record = run.head(Version(0, 1))
    assert gossip.take_head(record, sender, NOW, run.start_ms) == [Count("rejected", "rate")]
    assert gossip.verdict(record) == "rate"
    assert gossip.take_head(record, sender, NOW + 1.0, run.start_ms) == []
    assert gossip.take_fork_proof(b"a", b"b", link_to(SENDER), NOW) != [Count("rejected", "rate")]


def test_a_head_of_an_epoch_to_come_waits_for_the_epochs_record(run: Any, trust: Any, gossip: Gossip) -> None:
    epoch = run.epoch(1, 7)
    record = run.head(Version(1, 7), epoch_digest=record_digest(epoch))
    assert gossip.take_head(record, link_to(SENDER), NOW, run.start_ms) == []
    assert gossip.verdict(record) == "epoch"
    assert gossip.next_times([], NOW, run.start_ms) == [NOW + 1.0]
    assert gossip.retry(NOW + 1.0, run.start_ms) == []
    trust.accept_epoch(epoch)
    assert gossip.retry(NOW + 1.5, run.start_ms) == []
    assert gossip.verdict(record) == "epoch"
    gossip.retry(NOW + 2.0, run.start_ms)
    assert gossip.verdict(record) == ""
    assert len(gossip.due_for(link_to(OTHER), NOW, run.start_ms)) == 1
    assert gossip.next_times([], NOW, run.start_ms) == []


def test_a_head_that_waits_in_vain_is_given_up_and_counted(run: Any, gossip: Gossip) -> None:
    gossip.take_head(run.head(Version(1, 7), epoch_digest=run.digest("never")), None, NOW, run.start_ms)
    effects = [
        effect for second in range(1, UNRIPE_RETRIES_MAX + 1) for effect in gossip.retry(NOW + second, run.start_ms)
    ]
    assert effects == [Count("rejected", "epoch")]
    assert gossip.next_times([], NOW, run.start_ms) == []


def test_a_head_that_was_overtaken_while_it_waited_is_nobodys_fault(make_run: Any) -> None:
    """A newcomer hears of a version before it knows the run, and of a newer one right after."""
    run = make_run()
    trust = Trust(run.run_id, run.verify)
    gossip = Gossip(trust)
    gossip.take_head(run.head(Version(0, 1)), None, NOW, run.start_ms)
    trust.accept_descriptor(run.genesis)
    trust.accept_head(decode_signed(run.head(Version(0, 3))), run.start_ms)
    assert gossip.retry(NOW + UNRIPE_RETRIES_MAX, run.start_ms) == []


def test_few_heads_wait_at_once(run: Any, gossip: Gossip) -> None:
    effects = []
    for number in range(1, UNRIPE_MAX + 2):
        record = run.head(Version(1, number), epoch_digest=run.digest("never"))
        effects += gossip.take_head(record, None, NOW, run.start_ms)
        gossip.take_head(record, None, NOW, run.start_ms)
    assert effects == [Count("rejected", "queue")]
    assert len(gossip.next_times([], NOW, run.start_ms)) == UNRIPE_MAX


def test_an_expired_head_is_not_pushed(run: Any, gossip: Gossip) -> None:
    gossip.take_head(run.head(Version(0, 1)), None, NOW, run.start_ms)
    assert gossip.due_for(link_to(OTHER), NOW, run.start_ms + 300_000) == []


def test_a_fork_proof_travels_in_the_place_of_the_head(run: Any, trust: Any, gossip: Gossip) -> None:
    """A-AUTH-3."""
    first, second = (run.head(Version(0, 7), root=run.digest(root)) for root in ("a", "b"))
    gossip.take_head(first, None, NOW, run.start_ms)
    assert gossip.take_head(second, link_to(SENDER), NOW, run.start_ms) == [Count("rejected", "fork")]
    other = link_to(OTHER)
    (push,) = gossip.due_for(other, NOW, run.start_ms)
    assert isinstance(push.message, PushForkProof)
    other.start_push(1, push.digest)
    assert gossip.due_for(other, NOW, run.start_ms) == []
    follower = Gossip(run.trust())
    message = push.message
    assert follower.take_fork_proof(message.first, message.second, link_to(SENDER), NOW) == []
    assert follower.proof_verdict(message.first, message.second) == ""
    assert len(follower.due_for(link_to(OTHER), NOW, run.start_ms)) == 1


def test_a_fork_proof_of_an_epoch_that_is_not_known_yet_waits_for_it(run: Any, trust: Any, gossip: Gossip) -> None:
    """A neighbour pushes it once, to a newcomer before that had time to ask for anything."""
    epoch = run.epoch(1, 5)
    of_epoch = {"epoch_digest": record_digest(epoch)}
    first, second = (run.head(Version(1, 5), root=run.digest(root), **of_epoch) for root in ("one", "other"))
    assert gossip.take_fork_proof(first, second, link_to(SENDER), NOW) == []
    assert gossip.proof_verdict(first, second) == "epoch"
    assert gossip.next_times((), NOW, run.start_ms) == [NOW + UNRIPE_RETRY_SECONDS]
    gossip.retry(NOW + UNRIPE_RETRY_SECONDS, run.start_ms)
    assert trust.fork is None
    trust.accept_epoch(epoch)
    assert gossip.retry(NOW + 2 * UNRIPE_RETRY_SECONDS, run.start_ms) == []
    assert gossip.proof_verdict(first, second) == ""
    (push,) = gossip.due_for(link_to(OTHER), NOW, run.start_ms)
    assert push.message == PushForkProof(first, second)


def test_the_sender_of_a_proof_does_not_get_it_back_whatever_the_order(run: Any, gossip: Gossip) -> None:
    first, second = (run.head(Version(0, 7), root=run.digest(root)) for root in ("a", "b"))
    sender = link_to(SENDER)
    gossip.take_fork_proof(first, second, None, NOW)
    gossip.take_fork_proof(second, first, sender, NOW)
    assert gossip.due_for(sender, NOW, run.start_ms) == []


def test_a_proof_of_nothing_is_refused(run: Any, trust: Any, gossip: Gossip) -> None:
    first = run.head(Version(0, 7))
    second = encode_signed(decode_signed(run.head(Version(0, 8))))
    sender = link_to(SENDER)
    assert gossip.take_fork_proof(first, second, sender, NOW) == [Count("rejected", "mismatch")]
    assert gossip.proof_verdict(first, second) == "mismatch"
    assert trust.fork is None
    for _ in range(INCOMING_BURST):
        effects = gossip.take_fork_proof(first, second, sender, NOW)
    assert effects == [Count("rejected", "rate")]


def test_verdicts_are_bounded(run: Any, gossip: Gossip) -> None:
    for index in range(VERDICTS_MAX + 1):
        gossip.take_head(index.to_bytes(4, "big"), None, NOW, run.start_ms)
    assert gossip.verdict((0).to_bytes(4, "big")) == "rate"
    assert gossip.verdict((1).to_bytes(4, "big")) == "schema"
