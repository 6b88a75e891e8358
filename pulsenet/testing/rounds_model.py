"""A small model of the agreement on rounds, explored in every order in which it can happen.

A few authorities, one trainer with a residual, two rounds. The rules are those of ``chain/ballot.py``, called as
they are; only what surrounds them is simplified, each time so that more can happen than in a swarm:

* a message once sent stays: it may be taken at any later time, any number of times, or never. That is loss,
  delay, reordering and duplication;
* nothing outlives a step but what is stored, so every step begins like one after a restart. A crash between a
  step's store and its send is a message nobody takes; between its send and its store (a rule that is broken on
  purpose) it is a step of its own;
* whoever needs a final receipt may find it as soon as more than half stored it, or not yet, and may forget it;
* authorities are labelled in the order in which they first stand: relabelling them changes nothing else.

A contribution is a string of tokens, one for each round's inner steps; an outcome is what a receipt counts.
States are hash-consed: each is visited once, and the search ends when no new one is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pulsenet.chain import ballot as rules
from pulsenet.chain.ballot import Ballot, Place, Stored
from pulsenet.ids import Digest, PeerId

STEP_TOKENS = "ab"
"""What the trainer's inner steps of each round are called."""

NOTHING = Digest(b"")
"""The outcome that counts nobody."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A candidate voted for itself and asks for votes."""

    term: int
    candidate: int
    newest: Stored | None


@dataclass(frozen=True, slots=True)
class Vote:
    """An authority voted for another."""

    term: int
    candidate: int
    voter: int


@dataclass(frozen=True, slots=True)
class Propose:
    """A coordinator stored what a round counts and shows it in its term, which is the receipt's as well."""

    term: int
    receipt: Stored
    coordinator: int


@dataclass(frozen=True, slots=True)
class Countersign:
    """An authority stored a receipt of a coordinator."""

    receipt: Stored
    authority: int


@dataclass(frozen=True, slots=True)
class Contribute:
    """What the trainer sent for a round."""

    round_index: int
    outcome: Digest


Message = Stand | Vote | Propose | Countersign | Contribute


@dataclass(frozen=True, slots=True)
class Trainer:
    """What the trainer has on disk."""

    round_index: int = 0
    residual: str = ""
    pending: str = ""
    """What the contribution it stored for this round holds; empty before there is one."""


State = tuple[tuple[int, ...], Trainer, int]
"""Every disk (ballots by their number), and the set of everything ever sent, as the bits of a number."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What follows from the set of messages alone."""

    messages: tuple[Message, ...]
    finals: dict[int, set[Digest]]
    """What more than half of the authorities stored, by round."""
    violation: str


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules under test; each can be replaced by a broken one."""

    may_stand: Callable[[int, int], bool] = rules.may_stand
    is_majority: Callable[[int, int], bool] = rules.is_majority
    find_vote_refusal: Callable[..., str] = rules.find_vote_refusal
    find_store_refusal: Callable[..., str] = rules.find_store_refusal
    is_behind: Callable[[Stored | None, int], bool] = rules.is_behind
    find_inherited: Callable[[Stored | None, int], Stored | None] = rules.find_inherited
    stores_before_sending: bool = True
    proposes_in_own_term: bool = True
    """A receipt is proposed again under the new coordinator's term, not under its old one."""
    waits_for_final: bool = True
    """Only a final receipt moves state: not one that was merely proposed."""
    waits_for_round_before: bool = True
    """A coordinator closes a round only on top of the final receipt of the one before."""
    holds_while_pending: bool = True
    """The trainer never takes a pending contribution back by itself."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far the search goes."""

    authority_count: int = 3
    round_count: int = 2
    term_max: int = 2
    candidate_count: int = 3
    """Authorities that may stand, as far as the rules let them."""
    standing: tuple[int, ...] = ()
    """If given, the only one that stands in each term from 1 on: a shortcut to a violation that is far away."""
    states_max: int = 3_000_000


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found."""

    state_count: int
    violation: str
    """The rule that broke, or empty."""


class Model:
    """All steps from a state, and what must hold in each.

    Ballots, messages and what follows from a set of messages are numbered or kept, so that a state is a few
    integers.
    """

    def __init__(self, bounds: Bounds, tested: Rules | None = None) -> None:
        self.bounds = bounds
        self.rules = Rules() if tested is None else tested
        self._messages: list[Message] = []
        self._bits: dict[Message, int] = {}
        self._ballots: list[Ballot] = []
        self._numbers: dict[Ballot, int] = {}
        self._sent: dict[int, Sent] = {}
        self._orders: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self._answers: dict[tuple[int, int], tuple[int, dict[int, tuple[int, int]]]] = {}

    def start(self) -> State:
        """Return the state before anything happened."""
        return (self._number(Ballot()),) * self.bounds.authority_count, Trainer(), 0

    def steps(self, state: State) -> Iterator[State]:
        """Yield every state one step away."""
        ballots, _, mask = state
        sent = self.sent(mask)
        for index, number in enumerate(ballots):
            orders = self._orders.get((index, number, mask))
            if orders is None:
                found = {
                    *self._stand(index, number, sent),
                    *self._lead(index, number, sent),
                    *self._answers_to(index, number, mask),
                }
                # What neither stores nor says anything new leads nowhere.
                orders = tuple((after, said) for after, said in found if after != number or mask & said != said)
                self._orders[index, number, mask] = orders
            for after, said in orders:
                yield from self._store_then_send(state, index, after, said)
        yield from self._contribute(state)
        yield from self._learn(state, sent)

    def find_violation(self, state: State) -> str:
        """Return the invariant this state breaks, or the empty string."""
        sent = self.sent(state[2])
        return sent.violation or self._find_miscount(state[1], sent.finals)

    def sent(self, mask: int) -> Sent:
        """Return what follows from this set of messages."""
        sent = self._sent.get(mask)
        if sent is None:
            messages = tuple(message for index, message in enumerate(self._messages) if mask >> index & 1)
            finals = self._find_finals(messages)
            sent = self._sent[mask] = Sent(messages, finals, self._find_contradiction(messages, finals))
        return sent

    def _find_finals(self, messages: tuple[Message, ...]) -> dict[int, set[Digest]]:
        supporters: dict[tuple[Place, Digest], set[int]] = {}
        for message in messages:
            if isinstance(message, Propose | Countersign):
                receipt = message.receipt
                supporter = message.coordinator if isinstance(message, Propose) else message.authority
                supporters.setdefault((receipt.place, receipt.outcome), set()).add(supporter)
        finals: dict[int, set[Digest]] = {}
        for (place, outcome), authorities in supporters.items():
            if self.rules.is_majority(len(authorities), self.bounds.authority_count):
                finals.setdefault(place.round_index, set()).add(outcome)
        return finals

    def _find_contradiction(self, messages: tuple[Message, ...], finals: dict[int, set[Digest]]) -> str:
        votes: dict[tuple[int, int], int] = {}
        for message in messages:
            if isinstance(message, Stand | Vote):
                voter = message.candidate if isinstance(message, Stand) else message.voter
                if votes.setdefault((voter, message.term), message.candidate) != message.candidate:
                    return "a key voted twice in a term"
            if isinstance(message, Stand) and message.candidate and self.bounds.authority_count < 3:
                return "an automatic take-over with fewer than three authorities"
        if any(len(outcomes) > 1 for outcomes in finals.values()):
            return "two final receipts in one round"
        if any(index and index - 1 not in finals for index in finals):
            return "a round is final and the one before is not"
        return ""

    # The authorities

    def _stand(self, index: int, number: int, sent: Sent) -> Iterator[tuple[int, int]]:
        ballot = self._ballots[number]
        if not self.rules.may_stand(index, self.bounds.authority_count) or index >= self.bounds.candidate_count:
            return
        # Labels follow the order of standing; with take-overs ruled out, rank 0 is whoever stands.
        stood = {message.candidate for message in sent.messages if isinstance(message, Stand)}
        if index > len(stood) and self.bounds.authority_count > 2:
            return
        if self.rules.is_behind(ballot.newest, len(sent.finals)):
            return
        # It may have been shown a newer receipt than its own, and heard of terms in which it voted for nobody.
        stored = [message.receipt for message in sent.messages if isinstance(message, Propose)]
        shown = {receipt for receipt in stored if rules.is_older(ballot.newest, receipt)}
        for newest in (ballot.newest, *shown):
            for term in range(ballot.term + 1, self.bounds.term_max + 1):
                is_due = not self.bounds.standing or self.bounds.standing[term - 1] == index
                if is_due and (newest is None or newest.place.term < term):
                    after = rules.stand(ballot, _key(index), term)
                    yield self._number(after), self._bit(Stand(term, index, newest))

    def _lead(self, index: int, number: int, sent: Sent) -> Iterator[tuple[int, int]]:
        """Propose, as the coordinator of the term voted for; what is final is known, or not yet."""
        ballot = self._ballots[number]
        if ballot.voted_for != _key(index):
            return
        votes = [m for m in sent.messages if isinstance(m, Vote) and (m.term, m.candidate) == (ballot.term, index)]
        if not self.rules.is_majority(1 + len(votes), self.bounds.authority_count):
            return
        newest = ballot.newest
        for message in sent.messages:
            if isinstance(message, Stand) and (message.term, message.candidate) == (ballot.term, index):
                newest = message.newest if rules.is_older(newest, message.newest) else newest
        known_max = len(sent.finals) if self.rules.waits_for_round_before else self.bounds.round_count
        for round_index in range(min(known_max + 1, self.bounds.round_count)):
            if self.rules.is_behind(newest, round_index):
                continue
            inherited = self.rules.find_inherited(newest, round_index)
            counted = [m.outcome for m in sent.messages if isinstance(m, Contribute) and m.round_index == round_index]
            for outcome in (inherited.outcome,) if inherited else (NOTHING, *counted):
                term = ballot.term
                if inherited is not None and not self.rules.proposes_in_own_term:
                    term = inherited.place.term
                place = Place(round_index, term)
                if self.rules.find_store_refusal(replace(ballot, term=term), place=place, outcome=outcome):
                    continue
                receipt = Stored(place, outcome, outcome)
                yield self._number(replace(ballot, newest=receipt)), self._bit(Propose(ballot.term, receipt, index))

    def _answers_to(self, index: int, number: int, mask: int) -> Iterator[tuple[int, int]]:
        """Yield what an authority with this ballot may store and say, for each message sent."""
        silent, answers = self._answers.get((index, number), (0, {}))
        todo = mask & ~silent
        while todo:
            bit = todo & -todo
            todo ^= bit
            if bit not in answers:
                answer = self._answer(index, number, bit.bit_length() - 1)
                if answer is None:
                    silent |= bit
                    continue
                answers[bit] = answer
            yield answers[bit]
        self._answers[index, number] = silent, answers

    def _answer(self, index: int, number: int, message_index: int) -> tuple[int, int] | None:
        """Return the ballot an authority stores on a message and what it says then, if anything."""
        ballot, message = self._ballots[number], self._messages[message_index]
        if isinstance(message, Stand) and message.candidate != index:
            key = _key(message.candidate)
            if self.rules.find_vote_refusal(ballot, term=message.term, candidate=key, newest=message.newest):
                return None
            after = rules.vote(ballot, term=message.term, candidate=key)
            return self._number(after), self._bit(Vote(message.term, message.candidate, index))
        if isinstance(message, Propose) and message.coordinator != index:
            receipt = message.receipt
            # Under the broken rule an old receipt travels in a proposal of a later term, and that is what is judged.
            age = message.term - receipt.place.term
            promised = replace(ballot, term=ballot.term - age)
            if self.rules.find_store_refusal(promised, place=receipt.place, outcome=receipt.outcome):
                return None
            after = rules.store(promised, receipt, _key(message.coordinator))
            after = replace(after, term=after.term + age)
            return self._number(after), self._bit(Countersign(receipt, index))
        return None

    def _store_then_send(self, state: State, index: int, after: int, said: int) -> Iterator[State]:
        ballots, trainer, mask = state
        yield (*ballots[:index], after, *ballots[index + 1 :]), trainer, mask | said
        if not self.rules.stores_before_sending:
            yield ballots, trainer, mask | said  # the crash between the two

    # The trainer

    def _contribute(self, state: State) -> Iterator[State]:
        ballots, trainer, mask = state
        if trainer.round_index >= self.bounds.round_count:
            return
        pending = trainer.pending or trainer.residual + STEP_TOKENS[trainer.round_index]
        said = self._bit(Contribute(trainer.round_index, Digest(pending.encode())))
        yield ballots, replace(trainer, pending=pending), mask | said
        if not self.rules.holds_while_pending:
            yield ballots, Trainer(trainer.round_index + 1, pending, ""), mask

    def _learn(self, state: State, sent: Sent) -> Iterator[State]:
        ballots, trainer, mask = state
        outcomes = set(sent.finals.get(trainer.round_index, ()))
        if not self.rules.waits_for_final:
            receipts = [m.receipt for m in sent.messages if isinstance(m, Propose)]
            outcomes |= {receipt.outcome for receipt in receipts if receipt.place.round_index == trainer.round_index}
        for outcome in outcomes:
            residual = trainer.residual
            if trainer.pending:
                residual = "" if outcome == trainer.pending.encode() else trainer.pending
            yield ballots, Trainer(trainer.round_index + 1, residual, ""), mask

    # What is conserved

    def _find_miscount(self, trainer: Trainer, finals: dict[int, set[Digest]]) -> str:
        outcomes = {index: next(iter(found)).decode() for index, found in finals.items()}
        counted = "".join(outcomes.values())
        if len(set(counted)) != len(counted):
            return "a contribution was counted twice"
        passed = "".join(outcome for index, outcome in outcomes.items() if index < trainer.round_index)
        if set(passed) & set(trainer.pending or trainer.residual):
            return "a counted contribution was kept as well"
        # Counted in a round that is not the trainer's past yet, it is still pending there and nowhere else.
        ahead = set(counted) - set(passed)
        return "a counted contribution was lost" if ahead - set(trainer.pending) else ""

    def _number(self, ballot: Ballot) -> int:
        number = self._numbers.get(ballot)
        if number is None:
            number = self._numbers[ballot] = len(self._ballots)
            self._ballots.append(ballot)
        return number

    def _bit(self, message: Message) -> int:
        bit = self._bits.get(message)
        if bit is None:
            bit = self._bits[message] = 1 << len(self._messages)
            self._messages.append(message)
        return bit


def explore(model: Model) -> Result:
    """Visit every reachable state, nearest first, until none is left or a rule is broken."""
    start = model.start()
    seen = {start}
    frontier = [start]
    while frontier:
        following: list[State] = []
        for state in frontier:
            for after in model.steps(state):
                if after in seen:
                    continue
                seen.add(after)
                violation = model.find_violation(after)
                if violation:
                    return Result(len(seen), violation)
                following.append(after)
        assert len(seen) <= model.bounds.states_max
        frontier = following
    return Result(len(seen), "")


def _key(index: int) -> PeerId:
    return PeerId(bytes([index]))
