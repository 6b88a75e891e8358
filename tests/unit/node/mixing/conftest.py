"""A member's machine at a desk: who talks to it, and what it is told, is decided line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Roster, Share, ShareKind, SignedRecord, Vote
from pulsenet.chain.rosters import KnownRoster, Rosters
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest, seal
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, RunId
from pulsenet.node.effects import Effect, SaveState, SendRequest, StoreChunk, StoreChunkList, StoreRecord
from pulsenet.node.events import ChunkStored, Event, PeerConnected, PeerLost, ReplyReceived, RequestDone, TimerFired
from pulsenet.node.machine import Seat
from pulsenet.node.mixing.effects import CheckMean, CombineParts
from pulsenet.node.mixing.events import MixingAttached, PartSlice, PartStored, ResultWanted, RoundWanted, ShareSeen
from pulsenet.node.mixing.machine import Mixing
from pulsenet.outer.mixing import pairing
from pulsenet.outer.mixing.pairing import find_partner
from pulsenet.outer.mixing.settings import ALGORITHM, Job, MixingSettings, MixingVariant
from pulsenet.testing.fakes import FakeStore, make_descriptor, make_key, make_sign, verify
from pulsenet.testing.toy_mixing import SIZE, check_mean, combine, write_values
from pulsenet.wire.messages import (
    ChunkListReply,
    ChunkReply,
    GetChunkList,
    GetChunks,
    Message,
    PushReply,
    PushShare,
)
from pulsenet.wire.schema import decode_value

ADDRESSES = ()


@pytest.fixture(autouse=True)
def _one_slice_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a slice here is true of each: tests of several set it again."""
    monkeypatch.setattr(pairing, "SLICES_PER_OWNER_MAX", 1)


class Desk:
    """One member among others, all of whose keys are at hand.

    Args:
        place: Which of the keys, ascending, is the machine's.
        member_count: Members of the roster.
        variant: Of the run.
        journal: What an earlier life saved.
        changes: To the settings.
    """

    def __init__(
        self,
        place: int = 0,
        member_count: int = 2,
        variant: MixingVariant = MixingVariant.LOCAL_M1_M2,
        journal: bytes | None = None,
        **changes: Any,
    ) -> None:
        self.settings = MixingSettings(variant=variant, **changes)
        self.keys = sorted(make_key(f"member {index}") for index in range(member_count))
        self.stranger = make_key("stranger")
        self.me = self.keys[place]
        self.coordinator = self.keys[-1]
        owner, constants = make_key("owner"), self.settings.to_constants()
        self.descriptor = make_descriptor((self.coordinator,), self.keys, algorithm=ALGORITHM, constants=constants)
        genesis = seal(self.descriptor, make_sign(owner), owner)
        self.run_id = RunId(record_digest(genesis))
        self.trust = Trust(self.run_id, verify)
        self.trust.accept_descriptor(genesis)
        self.ledger = Ledger(self.trust)
        self.rosters = Rosters(self.trust, self.ledger)
        self.store = FakeStore()
        """Of this node; what others store is in here as well, under other names of chunks."""
        self.others = FakeStore()
        self.now = 0.0
        self.effects: list[Effect] = []
        self.machine = self.make_machine(journal)

    def make_machine(self, journal: bytes | None = None) -> Mixing:
        self.machine = Mixing(self.seat(self.me), self.rosters, self.settings, self.store, journal=journal)
        return self.machine

    def seat(self, peer_id: PeerId) -> Seat:
        """The place of a key in the run; nothing is left to chance."""
        return Seat(self.trust, self.ledger, peer_id, make_sign(peer_id), lambda count: 0)

    # Records

    def vote(self, term: int = 1) -> bytes:
        record = Vote(self.run_id, 0, term, self.coordinator, None)
        return encode_signed(self.sign(record, self.coordinator))

    def sign(self, record: Any, key: PeerId) -> SignedRecord:
        return seal(record, make_sign(key), key)

    def roster(self, **changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "term": 1,
            "number": 1,
            "first_round": 0,
            "round_count": 8,
            "members": tuple(self.keys),
            "subset": (),
        }
        return encode_signed(self.sign(Roster(**{**fields, **changes}), self.coordinator))

    def convene(self, **changes: Any) -> KnownRoster:
        """Let the coordinator's newest roster be known."""
        term = changes.get("term", 1)
        self.ledger.accept_mandate((self.vote(term),))
        record = self.roster(**changes)
        self.rosters.accept(record)
        known = self.rosters.newest
        assert known is not None
        return known

    def partner(self, round_index: int, job: Job) -> PeerId:
        known = self.rosters.find(round_index)
        assert known is not None
        found = find_partner(known.digest, round_index, job, known.members, self.me)
        assert found is not None
        return found

    def part(self, values: Any, round_index: int = 0, job: int = 1, store: FakeStore | None = None) -> PartSlice:
        return write_values(self.others if store is None else store, values, round_index, job)

    def share(self, key: PeerId, part: PartSlice, **changes: Any) -> bytes:
        known = self.rosters.find(changes.get("round_index", 0))
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "peer_id": key,
            "roster": bytes(32) if known is None else known.digest,
            "round_index": 0,
            "job": 1,
            "kind": ShareKind.PART,
            "slice_index": 0,
            "slice_count": 1,
            "contributors": b"",
            "blob_id": part.blob_id,
            "encoded_size_bytes": part.encoded_size_bytes,
            "element_count": part.element_count,
            "norm_bits": part.norm_bits,
            "mixed_root": None,
        }
        signer = changes.pop("signer", key)
        return encode_signed(self.sign(Share(**{**fields, **changes}), signer))

    # Talk

    def tell(self, event: Event) -> list[Effect]:
        """Hand the machine an event, and keep what it orders on the fake disk."""
        effects = self.machine.handle(event, self.now, 0)
        self.effects += effects
        followed: list[Effect] = []
        for effect in effects:
            match effect:
                case SaveState(key, value):
                    self.store.state[key] = value
                case StoreRecord(record):
                    self.store.put_record(record)
                case StoreChunkList(blob_id, data):
                    self.store.lists[blob_id] = data
                case StoreChunk(digest, data):
                    self.store.chunks[digest] = data
                    followed += self.tell(ChunkStored(digest))
                case _:
                    pass
        return effects + followed

    def wait(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.tell(TimerFired())

    def connect(self, *keys: PeerId) -> None:
        for key in keys or [key for key in self.keys if key != self.me]:
            self.tell(PeerConnected(key, ADDRESSES, outbound=True))

    def lose(self, key: PeerId) -> list[Effect]:
        return self.tell(PeerLost(key, "closed"))

    def open(self, round_index: int = 0) -> list[Effect]:
        """Attach a training process and open a round."""
        self.tell(MixingAttached(round_index, SIZE))
        return self.tell(RoundWanted(round_index))

    @property
    def other(self) -> PeerId:
        """The first of the others."""
        return next(key for key in self.keys if key != self.me)

    def begin(self, *slices: Any) -> Desk:
        """Open a round among all, who are connected, and hand the own vector over, if one is given."""
        self.convene()
        self.connect()
        self.open()
        if slices:
            self.hand_over(*slices)
        return self

    def hand_over(self, *slices: Any, round_index: int = 0, job: Job = Job.MIX1, wants: bool = True) -> list[Effect]:
        parts = tuple(self.part(values, round_index, int(job), self.store) for values in slices)
        effects = self.tell(PartStored(round_index, job, parts))
        return effects + (self.tell(ResultWanted(round_index, job)) if wants else [])

    def push(self, key: PeerId, record: bytes) -> str:
        """Let a peer push a share; return the code of the answer."""
        self.tell(ShareSeen(record, key))
        return self.machine.verdicts.find(PushShare(record))

    def serve(self) -> list[Effect]:
        """Answer every question for chunk lists and chunks from the others' store, until there is none."""
        done: list[Effect] = []
        pending = [e for e in self.effects if isinstance(e, SendRequest)]
        self.effects = [e for e in self.effects if not isinstance(e, SendRequest)]
        while pending:
            request = pending.pop(0)
            replies = self._answer(request)
            if not replies:
                self.effects.append(request)
                continue
            for reply in replies:
                done += self.tell(ReplyReceived(request.request_id, request.peer_id, reply))
            if isinstance(request.message, GetChunks):
                done += self.tell(RequestDone(request.request_id, request.peer_id))
            pending += [e for e in self.effects if isinstance(e, SendRequest) and self._answer(e)]
            self.effects = [e for e in self.effects if not (isinstance(e, SendRequest) and self._answer(e))]
        return done

    def _answer(self, request: SendRequest) -> list[Message]:
        match request.message:
            case GetChunkList(blob_id, _):
                data = self.others.lists.get(blob_id)
                return [] if data is None else [ChunkListReply(blob_id, len(data), data)]
            case GetChunks(digests, _):
                return [ChunkReply(digest, self.others.chunks.get(digest)) for digest in digests]
            case _:
                return []

    def work(self) -> list[Effect]:
        """Carry out the combinations and checks that were ordered."""
        done: list[Effect] = []
        orders = [effect for effect in self.effects if isinstance(effect, CombineParts | CheckMean)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, CombineParts | CheckMean)]
        for order in orders:
            done += self.tell(
                combine(self.store, order) if isinstance(order, CombineParts) else check_mean(self.store, order)
            )
        return done

    def pushed(self, kind: ShareKind | None = None) -> list[tuple[PeerId, Share]]:
        """Return the shares that were pushed, of one kind if given."""
        found = []
        for effect in self.effects:
            if isinstance(effect, SendRequest) and isinstance(effect.message, PushShare):
                share = decode_value(Share, decode_signed(effect.message.share).payload)
                if kind is None or share.kind is kind:
                    found.append((effect.peer_id, share))
        return found

    def judge(self, code: str) -> list[Effect]:
        """Answer the pushes that are in flight."""
        done: list[Effect] = []
        for effect in [e for e in self.effects if isinstance(e, SendRequest) and isinstance(e.message, PushShare)]:
            self.effects.remove(effect)
            done += self.tell(ReplyReceived(effect.request_id, effect.peer_id, PushReply(not code, code)))
        return done

    def find(self, kind: type) -> list[Any]:
        """Return the effects of a kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]


@pytest.fixture
def make_desk() -> Callable[..., Desk]:
    return Desk
