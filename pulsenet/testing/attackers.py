"""Peers that attack those who follow a run, in the five ways that The Update Framework names.

An attacker follows the run like anybody else, so that it holds every record that was ever signed, and lies when it is
asked. It sits in nobody's list of trusted peers: who is asked finds out by the rules of :mod:`pulsenet.chain.trust`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import ClassVar, Final

from pulsenet import limits
from pulsenet.chain.records import Head
from pulsenet.chain.signing import decode_signed, encode_signed, seal
from pulsenet.ids import Digest, PeerId, RunId, Version, compute_digest
from pulsenet.node.effects import Effect, SendRequest
from pulsenet.testing.fakes import make_sign
from pulsenet.testing.node import SimNode
from pulsenet.testing.world import World
from pulsenet.wire.messages import (
    ChunkListReply,
    ChunkReply,
    GetChunkList,
    GetChunks,
    GetDescriptors,
    GetEpochs,
    GetHead,
    GetHoldings,
    GetRecords,
    HeadReply,
    HoldingsReply,
    Message,
    PushForkProof,
    PushHead,
    RecordsReply,
)
from pulsenet.wire.schema import INTEGER_MAX, decode_value

ENDLESS_REPLIES: Final = 8
"""Replies to one request where one is due."""

JUNK_SIZE_BYTES: Final = 2 * limits.CHUNK_SIZE_BYTES_MAX
"""More than any message may hold: the simulator hands messages over without the wire's own limits."""


class Attack(StrEnum):
    """One of the five classes of attack."""

    ROLLBACK = "rollback"
    """Valid records of long ago, also stored again in the directory."""
    FAST_FORWARD = "fast-forward"
    """A head with the greatest number there is, so that nothing can follow."""
    FREEZE = "freeze"
    """The same valid head for ever."""
    MIX_AND_MATCH = "mix-and-match"
    """Valid records, lists and chunks, each in the place of another, and those of another run."""
    ENDLESS = "endless"
    """Answers that are larger and more than what was asked for."""


class Attacker(SimNode):
    """A peer that knows everything and lies; ``attack`` says how. Until then it is an honest seed."""

    is_honest = False
    attack: Attack | None = None
    leaked_key: PeerId | None = None
    """An authority's key that it signs with; without one it has only its own."""
    frozen_head: bytes | None = None
    """What it answers for ever, in attacks with old records."""
    lie_count = 0

    def start_attack(self, attack: Attack, leaked_key: PeerId | None = None) -> None:
        """Lie from now on; what is newest now is what it will be stuck at."""
        self.attack, self.leaked_key = attack, leaked_key
        self.frozen_head = self.store.newest_head()

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a request with what serves the attack."""
        true = super().answer(request, asker)
        if self.attack is None:
            return true
        lies = self._LIES[self.attack](self, request, true)
        self.lie_count += lies != true
        return lies

    def make_pushes(self) -> list[Message]:
        """Return what it pushes to its victims unasked."""
        match self.attack:
            case Attack.ROLLBACK | Attack.FREEZE if self.frozen_head is not None:
                return [PushHead(self.frozen_head)]
            case Attack.FAST_FORWARD:
                return [PushHead(self._make_last_head())]
            case Attack.MIX_AND_MATCH if self.frozen_head is not None:
                records = sorted(self.store.records.values())
                return [PushHead(self._swap_signature()), PushForkProof(records[0], records[-1])]
            case Attack.ENDLESS:
                return [PushHead(bytes(JUNK_SIZE_BYTES)), PushForkProof(bytes(JUNK_SIZE_BYTES), b"")]
            case _:
                return []

    def _execute(self, machine: str, effect: Effect) -> None:
        if self.attack is not None and isinstance(effect, SendRequest) and isinstance(effect.message, PushHead):
            return  # what its honest half has learnt since, it keeps to itself
        super()._execute(machine, effect)

    # One lie for each attack

    def _answer_old(self, request: Message, true: list[Message]) -> list[Message]:
        return [HeadReply(self.frozen_head)] if isinstance(request, GetHead) else true

    def _answer_last(self, request: Message, true: list[Message]) -> list[Message]:
        return [HeadReply(self._make_last_head())] if isinstance(request, GetHead) else true

    def _answer_mixed(self, request: Message, true: list[Message]) -> list[Message]:
        match request:
            case GetHead() if self.frozen_head is not None:
                return [HeadReply(self._swap_signature())]
            case GetRecords(digests):
                others = [data for digest, data in sorted(self.store.records.items()) if digest not in digests]
                return [RecordsReply(tuple(others[: len(digests)]))]
            case GetDescriptors() | GetEpochs():
                return [RecordsReply((self._make_other_genesis(),))]
            case GetChunkList(blob_id):
                others = [data for other, data in sorted(self.store.lists.items()) if other != blob_id]
                return [ChunkListReply(blob_id, len(others[0]), others[0])] if others else true
            case GetChunks(digests):
                return self._mix_chunks(digests) or true
            case _:
                return true

    def _mix_chunks(self, digests: tuple[Digest, ...]) -> list[Message]:
        """Answer each chunk with the bytes of another: under the name asked for, and under their own."""
        others = [item for item in sorted(self.store.chunks.items()) if item[0] not in digests][: len(digests)]
        renamed = [ChunkReply(digest, data) for digest, (_, data) in zip(digests, others, strict=False)]
        return [*renamed, *(ChunkReply(digest, data) for digest, data in others)]

    def _answer_endlessly(self, request: Message, true: list[Message]) -> list[Message]:
        junk = bytes(JUNK_SIZE_BYTES)
        match request:
            case GetHead():
                return [HeadReply(junk)] * ENDLESS_REPLIES
            case GetRecords() | GetDescriptors() | GetEpochs():
                return [RecordsReply((junk,) * ENDLESS_REPLIES)] * ENDLESS_REPLIES
            case GetChunkList(blob_id):
                return [ChunkListReply(blob_id, INTEGER_MAX, junk)] * ENDLESS_REPLIES
            case GetHoldings(blob_id):
                return [HoldingsReply(blob_id, junk, junk)] * ENDLESS_REPLIES
            case GetChunks(digests):
                return [ChunkReply(digest, junk) for digest in digests for _ in range(ENDLESS_REPLIES)]
            case _:
                return true

    _LIES: ClassVar[dict[Attack, Callable[[Attacker, Message, list[Message]], list[Message]]]] = {
        Attack.ROLLBACK: _answer_old,
        Attack.FREEZE: _answer_old,
        Attack.FAST_FORWARD: _answer_last,
        Attack.MIX_AND_MATCH: _answer_mixed,
        Attack.ENDLESS: _answer_endlessly,
    }

    # What it makes

    def _make_last_head(self) -> bytes:
        """Return a head that nothing can follow, signed with the leaked key or its own."""
        key = self.leaked_key or self.peer_id
        now_ms = self._world.wall_ms(self)
        head = Head(
            run_id=RunId(self._run_id()),
            revision=0,
            term=INTEGER_MAX,
            version=Version(0, INTEGER_MAX),
            root=compute_digest(b"no such weights"),
            manifest_digest=compute_digest(b"no such manifest"),
            catalogue_digest=compute_digest(b"no such catalogue"),
            epoch_digest=None,
            issued_at_ms=now_ms,
            valid_until_ms=now_ms + round(1000 * limits.HEAD_VALIDITY_SECONDS),
        )
        return encode_signed(seal(head, make_sign(key), key))

    def _swap_signature(self) -> bytes:
        """Return the newest head's claims under the signature of an older one."""
        assert self.frozen_head is not None
        newest, old = decode_signed(self.store.newest_head() or self.frozen_head), decode_signed(self.frozen_head)
        higher = decode_value(Head, newest.payload)
        forged = seal(
            replace(higher, version=Version(higher.version.epoch, higher.version.number + 1)),
            make_sign(self.peer_id),
            self.peer_id,
        )
        return encode_signed(replace(forged, signers=old.signers, signatures=old.signatures))

    def _make_other_genesis(self) -> bytes:
        """Return the signed genesis of another run of the same owner."""
        signed = self._world.genesis
        return encode_signed(replace(signed, payload=signed.payload.replace(b"simulated", b"duplicate")))

    def _run_id(self) -> bytes:
        return compute_digest(self._world.genesis.payload)


def add_attacker(world: World, name: str) -> Attacker:
    """Add a peer that will attack; it begins as a seed that nobody can tell from others."""
    node = world.add_node(name, "seed", make=Attacker)
    assert isinstance(node, Attacker)
    return node


def press(world: World, attackers: list[Attacker], seconds: float) -> None:
    """Let attackers push to everybody they reach, and store old heads in the directory, while time passes."""
    end = world.now + seconds
    while world.now < end:
        for attacker in attackers:
            for node in tuple(world.nodes.values()):
                if node is attacker or not node.is_up or world.network.is_cut(attacker.peer_id, node.peer_id):
                    continue
                for push in attacker.make_pushes():
                    attacker.lie_count += 1
                    world.answer(node, push, attacker.peer_id)
            if attacker.attack is Attack.ROLLBACK and attacker.frozen_head is not None:
                # A real directory refuses it, since its expiry is signed; here nothing stands in its way.
                world.directory.heads[world.trainer_key] = attacker.frozen_head
        world.run_for(min(world.chance.between(1.0, 10.0), max(end - world.now, 0.0)))
