"""What became of pushed items."""

from __future__ import annotations

from pulsenet.ids import PeerId
from pulsenet.node.events import ContributionSeen, ReceiptSeen, TermSeen, TimerFired, VoteSeen
from pulsenet.node.verdicts import VERDICTS_MAX, Verdicts
from pulsenet.wire.messages import PushContribution, PushReceipt, PushTerm, PushVote

PEER = PeerId(bytes(32))


def test_each_kind_of_item_finds_its_code() -> None:
    verdicts = Verdicts()
    verdicts.note(VoteSeen(b"vote", PEER), "stale")
    verdicts.note(ContributionSeen(b"contribution", PEER), "round")
    verdicts.note(ReceiptSeen(b"receipt", (b"v",), PEER), "term")
    verdicts.note(TermSeen((b"a", b"b"), PEER), "untrusted")
    verdicts.note(TimerFired(), "nothing")
    assert verdicts.find(PushVote(b"vote")) == "stale"
    assert verdicts.find(PushContribution(b"contribution")) == "round"
    assert verdicts.find(PushReceipt(b"receipt", ())) == "term"
    assert verdicts.find(PushTerm((b"a", b"b"))) == "untrusted"


def test_what_nobody_judged_was_taken() -> None:
    assert Verdicts().find(PushVote(b"vote")) == ""


def test_the_newest_verdict_counts_and_the_oldest_goes() -> None:
    verdicts = Verdicts()
    verdicts.note(VoteSeen(b"first", PEER), "stale")
    verdicts.note(VoteSeen(b"first", PEER), "")
    assert verdicts.find(PushVote(b"first")) == ""
    for number in range(VERDICTS_MAX + 1):
        verdicts.note(VoteSeen(bytes([number % 256, number // 256]), PEER), "lease")
    assert verdicts.find(PushVote(bytes([0, 0]))) == ""
    assert verdicts.find(PushVote(bytes([VERDICTS_MAX % 256, VERDICTS_MAX // 256]))) == "lease"
