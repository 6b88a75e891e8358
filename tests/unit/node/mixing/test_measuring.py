"""A coordinator collects answers to probes, has them compared, and lets the subset follow; members answer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Probe, Roster
from pulsenet.chain.signing import decode_signed, encode_signed
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import Count, Effect, Report, SendRequest, ShowToMachines
from pulsenet.node.events import PeerConnected, ReplyReceived, RequestFailed, TimerFired
from pulsenet.node.mixing.convener import SETTLE_SECONDS, Convener
from pulsenet.node.mixing.effects import CompareProbes
from pulsenet.node.mixing.events import MastersTold, PresenceSeen, ProbeMade, ProbesCompared, ProbeSeen
from pulsenet.node.mixing.measuring import COLLECT_SECONDS
from pulsenet.node.mixing.prober import RESEND_SECONDS
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.disagreement import encode_probe
from pulsenet.outer.mixing.pairing import choose_probers
from pulsenet.outer.mixing.settings import MixingVariant
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.wire.messages import PushProbe, PushReply
from pulsenet.wire.schema import decode_value

MakeDesk = Callable[..., Any]
TABLE = make_table([TensorSpec(name, "F32", (5,)) for name in ("embed", "h.0", "h.1", "h.2", "h.3")])
BATCH, BINS = compute_digest(b"batch"), compute_digest(b"bins")
SUBSET = MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET


def encode(*row: float, round_index: int = 0) -> bytes:
    return encode_probe(np.array([row]), round_index=round_index)


class Office:
    """The coordinator among three trainers that are there; every second round is probed."""

    def __init__(self, make_desk: MakeDesk, variant: MixingVariant = SUBSET, **changes: Any) -> None:
        settings = {"probe_interval": 2, "disagreement_max": 0.25, "roster_rounds": 8, **changes}
        self.desk = desk = make_desk(2, 3, variant, **settings)
        self.me = desk.coordinator
        self.now = 0.0
        self.effects: list[Effect] = []
        self.begin_again()
        self.see(0)

    def begin_again(self) -> None:
        """Begin another life that knows the rosters of the one before."""
        desk = self.desk
        self.convener = Convener(desk.seat(self.me), desk.rosters, desk.settings)
        self.tell(MastersTold(TABLE))

    def tell(self, event: Any, after_seconds: float = 0.0) -> list[Effect]:
        self.now += after_seconds
        effects = self.convener.handle(event, self.now, 0)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, ShowToMachines):
                self.tell(effect.event)
        return effects

    def see(self, round_index: int) -> None:
        for key in self.desk.keys:
            self.tell(PresenceSeen(key, round_index))

    @property
    def roster(self) -> Roster:
        found: Roster = self.desk.rosters.newest.roster
        return found

    def record(self, key: PeerId, *row: float, **changes: Any) -> bytes:
        round_index = changes.get("round_index", 0)
        known = self.desk.rosters.find(round_index)
        fields: dict[str, Any] = {
            "run_id": self.desk.run_id,
            "revision": 0,
            "peer_id": key,
            "roster": known.digest,
            "round_index": round_index,
            "batch": BATCH,
            "bins": BINS,
            "answer": encode(*(row or (0.5, 0.5)), round_index=round_index),
            "scores": b"",
        }
        return encode_signed(self.desk.sign(Probe(**{**fields, **changes}), changes.pop("signer", key)))

    def push(self, record: bytes, source: PeerId | None = None) -> str:
        self.tell(ProbeSeen(record, source or self.desk.keys[0]))
        return self.convener.verdicts.find(PushProbe(record))

    def orders(self) -> list[CompareProbes]:
        return [effect for effect in self.effects if isinstance(effect, CompareProbes)]

    def measure(self, distance: float | None, round_index: int, scores: bytes = b"") -> list[Effect]:
        """Let everybody answer the probe of a round, and the shell find that distance."""
        self.see(round_index)
        for key in self.desk.keys:
            assert self.push(self.record(key, round_index=round_index, scores=scores)) == ""
        return self.tell(ProbesCompared(self.orders()[-1].number, distance))


def test_answers_that_newer_ones_push_out_are_compared_as_far_as_they_came(make_desk: MakeDesk) -> None:
    """Rounds may be shorter than the wait for a trainer that answers no probe."""
    office = Office(make_desk)
    compared = []
    for round_index in (0, 2, 4, 6):
        office.see(round_index)
        for key in office.desk.keys[:2]:
            assert office.push(office.record(key, round_index=round_index)) == ""
        compared += [order.round_index for order in office.orders()]
        if office.orders():
            office.tell(ProbesCompared(office.orders()[-1].number, 0.125))
            office.effects.clear()
    assert compared == [0, 2]
    assert office.desk.rosters.measured == (2, fp32_to_bits(0.125))


def test_a_slow_comparison_holds_no_further_rounds(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    for round_index in range(0, 20, 2):
        office.see(round_index)
        for key in office.desk.keys[:2]:
            assert office.push(office.record(key, round_index=round_index)) == ""
        assert office.convener.measuring.kept_count <= 3 * 2
    assert [order.round_index for order in office.orders()] == [0]


def test_the_odd_one_out_of_pairs_is_not_waited_for(make_desk: MakeDesk) -> None:
    office = Office(make_desk, MixingVariant.LOCAL_M1_M2)
    known = office.desk.rosters.find(0)
    *paired, odd = choose_probers(known.digest, 0, known.members)
    for key in paired:
        assert office.orders() == []
        assert office.push(office.record(key)) == ""
    assert len(office.orders()) == 1
    assert len(office.orders()[0].answers) == 2
    assert office.push(office.record(odd)) == "round"


def test_answers_are_compared_once_all_are_there(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    rows = {key: (0.5, 0.25 + 0.125 * place, 0.25 - 0.125 * place) for place, key in enumerate(office.desk.keys)}
    for key, row in reversed(rows.items()):
        assert office.orders() == []
        assert office.push(office.record(key, *row)) == ""
    (order,) = office.orders()
    assert order.round_index == 0
    assert [answer.data for answer in order.answers] == [encode(*rows[key]) for key in sorted(rows)]
    assert {(answer.batch, answer.bins) for answer in order.answers} == {(BATCH, BINS)}
    assert office.push(office.record(office.me, 1.0, 0.0)) == "round"
    effects = office.tell(ProbesCompared(order.number, 0.125))
    assert Report((("disagreement", 0.125), ("disagreement_round", 0))) in effects
    assert office.desk.rosters.measured == (0, fp32_to_bits(0.125))
    assert office.convener.measuring.kept_count == 0
    assert office.push(office.record(office.me)) == "round", "it is over"
    assert office.tell(ProbesCompared(order.number, 0.9)) == [], "an answer to an order that is answered"


def test_whoever_does_not_answer_is_waited_for_a_minute(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    assert office.push(office.record(office.desk.keys[0])) == ""
    office.see(0)
    office.tell(TimerFired(), COLLECT_SECONDS - 1.0)
    assert office.orders() == []
    office.see(0)
    office.tell(TimerFired(), 1.0)
    (order,) = office.orders()
    assert len(order.answers) == 1
    assert Count("probes", "alone") in office.tell(ProbesCompared(order.number, None))
    assert office.desk.rosters.measured is None, "nothing was measured"


def test_what_may_not_be_counted_is_refused_with_its_code(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    first, second, _ = office.desk.keys
    record = office.record(first)
    assert office.push(record) == ""
    assert office.push(record) == "", "told again, it is the same"
    assert office.push(office.record(first, 1.0, 0.0)) == "duplicate"
    assert office.push(office.record(second, roster=Digest(bytes(32)))) == "roster"
    assert office.push(office.record(second, round_index=1)) == "unexpected", "no round with a probe"
    assert office.push(office.record(second, round_index=4)) == "early", "most are in round 0"
    assert office.push(office.record(second, peer_id=first)) == "untrusted"
    assert office.push(office.record(office.desk.stranger)) == "untrusted"
    assert office.push(office.record(second, answer=b"rubbish")) == "probe-header"
    assert office.push(office.record(second, answer=encode(0.5, 0.5, round_index=2))) == "probe-header"
    assert office.push(office.record(second, answer=encode(0.5, 0.5)[:-2] + b"\0\x3c")) == "probe-values"
    assert office.push(office.record(second, scores=bytes(12))) == "mismatch", "the subset has two tensors"
    assert office.push(b"rubbish") == "schema"
    assert office.convener.measuring.kept_count == 1
    assert office.push(office.record(second)) == "", "a fault of before is not held against what is right"


def test_who_does_not_coordinate_takes_no_answer(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.begin_again()
    assert not office.convener.is_leading(office.now)
    assert office.push(office.record(office.me)) == "unexpected"


def test_a_run_that_never_probes_takes_no_answer(make_desk: MakeDesk) -> None:
    office = Office(make_desk, probe_interval=0)
    assert office.push(office.record(office.me)) == "unexpected"


def test_of_more_than_two_rounds_the_oldest_takes_no_more(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(4)
    for round_index in (2, 4, 6):
        assert office.push(office.record(office.me, round_index=round_index)) == ""
    assert [order.round_index for order in office.orders()] == [2]
    assert office.push(office.record(office.desk.keys[0], round_index=2)) == "round"
    assert office.push(office.record(office.me, round_index=0)) == "round"


def test_the_subset_widens_by_the_next_roster_and_narrows_to_what_disagreed_most(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    assert office.roster.subset == (0, 1)
    assert (office.roster.probe_round, office.roster.distance_bits) == (None, None)
    effects = office.measure(0.3, 0, struct.pack("<2f", 1.0, 3.0))
    assert Count("subsets", "widened") in effects
    assert office.roster.subset == (0, 1), "nothing changes but by a roster"
    office.tell(TimerFired(), SETTLE_SECONDS)
    wide, measured = office.roster, (0, fp32_to_bits(0.3))
    assert wide.subset == (0, 1, 2)
    assert (wide.probe_round, wide.distance_bits) == measured
    assert wide.first_round == 2, "two rounds on, so that everybody knows it in time"
    assert Count("subsets", "narrowed") not in office.measure(0.2, 2), "not far, not near"
    assert Count("subsets", "narrowed") in office.measure(0.1, 4, struct.pack("<3f", 1.0, 1.0, 2.0))
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.subset == (1, 2), "the embeddings disagreed least"


def test_a_subset_that_does_not_fit_the_masters_any_more_is_chosen_anew(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.measure(0.3, 0)
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.subset == (0, 1, 2)
    office.tell(MastersTold(make_table(TABLE.tensors[:2])))
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.subset == (0,)
    office.measure(0.3, 4)
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.subset == (0, 1)


def test_a_distance_of_another_subset_changes_nothing(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    old = [office.record(key, round_index=2) for key in office.desk.keys]
    office.measure(0.3, 0)
    office.see(2)
    for record in old:
        office.push(record)
    assert Count("subsets", "widened") not in office.tell(ProbesCompared(office.orders()[-1].number, 0.9))
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.subset == (0, 1, 2), "widened once"


@pytest.mark.parametrize("changes", [{"disagreement_max": 0.0}, {"variant": MixingVariant.GLOBAL_M1_LOCAL_M2}])
def test_without_a_limit_or_a_subset_a_distance_is_only_shown(make_desk: MakeDesk, changes: dict[str, Any]) -> None:
    office = Office(make_desk, **changes)
    before = office.roster.subset
    effects = office.measure(1.0, 0)
    assert not [effect for effect in effects if isinstance(effect, Count) and effect.name == "subsets"]
    office.tell(TimerFired(), SETTLE_SECONDS)
    office.see(7)
    assert office.roster.subset == before
    assert office.roster.probe_round == 0, "the roster that follows says what was measured"


def test_the_next_coordinator_goes_on_with_the_subset_and_the_distance_of_the_last_roster(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.measure(0.3, 0)
    office.tell(TimerFired(), SETTLE_SECONDS)
    office.begin_again()
    office.see(9)
    assert office.roster.number == 1
    assert office.roster.term == 2
    assert office.roster.subset == (0, 1, 2)
    assert office.roster.distance_bits == fp32_to_bits(0.3)


# Members


def make_member(make_desk: MakeDesk, place: int = 0, **changes: Any) -> Any:
    desk = make_desk(place, 3, SUBSET, probe_interval=2, **changes)
    desk.convene(subset=(0, 3))
    desk.connect()
    return desk


def made(round_index: int = 0, scores: bytes = bytes(8)) -> ProbeMade:
    return ProbeMade(round_index, BATCH, BINS, encode(0.5, 0.5, round_index=round_index), scores)


def pushed(desk: Any) -> list[SendRequest]:
    return [e for e in desk.find(SendRequest) if isinstance(e.message, PushProbe)]


def test_a_member_signs_its_answer_once_and_pushes_it_until_it_is_judged(make_desk: MakeDesk) -> None:
    desk = make_member(make_desk)
    (opened,) = [effect for effect in desk.open() if hasattr(effect, "is_probed")]
    assert opened.is_probed
    desk.tell(made())
    desk.tell(made())
    (first,) = pushed(desk)
    assert first.peer_id == desk.coordinator
    signed = decode_signed(first.message.probe)
    probe = desk.trust.accept_probe(signed, desk.rosters.newest.roster, desk.rosters.newest.digest)
    assert (probe.round_index, probe.batch, probe.bins, probe.scores) == (0, BATCH, BINS, bytes(8))
    desk.tell(RequestFailed(first.request_id, first.peer_id, "timeout"))
    desk.wait(RESEND_SECONDS)
    desk.tell(ReplyReceived(pushed(desk)[-1].request_id, desk.coordinator, PushReply(False, "early")))
    desk.wait(RESEND_SECONDS)
    assert len(pushed(desk)) == 3
    desk.tell(ReplyReceived(pushed(desk)[-1].request_id, desk.coordinator, PushReply(True, "")))
    desk.wait(RESEND_SECONDS)
    assert len(pushed(desk)) == 3
    assert {push.message.probe for push in pushed(desk)} == {first.message.probe}


def test_a_refusal_ends_it_and_is_counted(make_desk: MakeDesk) -> None:
    desk = make_member(make_desk)
    desk.open()
    desk.tell(made())
    (push,) = pushed(desk)
    desk.tell(ReplyReceived(push.request_id, desk.coordinator, PushReply(False, "probe-values")))
    assert Count("probes", "refused") in desk.find(Count)
    desk.wait(RESEND_SECONDS)
    assert len(pushed(desk)) == 1


def test_an_answer_is_given_up_when_the_rounds_went_on(make_desk: MakeDesk) -> None:
    desk = make_member(make_desk)
    desk.lose(desk.coordinator)
    desk.open()
    desk.tell(made())
    assert pushed(desk) == []
    desk.open(3)
    desk.tell(PeerConnected(desk.coordinator, (), outbound=True))
    desk.wait(RESEND_SECONDS)
    assert pushed(desk) == []


def test_only_who_is_asked_answers_and_scores_fit_the_roster(make_desk: MakeDesk) -> None:
    desk = make_member(make_desk)
    desk.open(1)
    desk.tell(made(1))
    desk.tell(made(40))
    assert pushed(desk) == []
    desk.tell(made(2, scores=bytes(12)))
    (push,) = pushed(desk)
    assert decode_value(Probe, decode_signed(push.message.probe).payload).scores == b""


def test_the_coordinators_own_answer_needs_no_message(make_desk: MakeDesk) -> None:
    desk = make_member(make_desk, 2)
    desk.open()
    desk.tell(made())
    assert pushed(desk) == []
    (shown,) = [e.event for e in desk.find(ShowToMachines) if isinstance(e.event, ProbeSeen)]
    assert shown.source == desk.me
