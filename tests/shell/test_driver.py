"""The driver executes effects in order and brings answers back to the machine that asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pulsenet.errors import StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, Log, SaveState, SendRequest, SetTimer, ShowToMachines
from pulsenet.node.events import (
    ContributionSeen,
    Event,
    HeadSeen,
    PeerLost,
    ReceiptSeen,
    RequestDone,
    StateLost,
    StateReached,
    StoreFailed,
    TermSeen,
    TimerFired,
    TrainingLost,
    VoteSeen,
)
from pulsenet.wire.messages import GetHead
from pulsenetd.driver import Driver, Post

PEER = PeerId(b"p" * 32)


class Scripted:
    """A machine that answers each event by a table and remembers what it was told."""

    def __init__(self, table: dict[type[Event], list[Effect]]) -> None:
        self.table = table
        self.seen: list[Event] = []

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        self.seen.append(event)
        return self.table.get(type(event), [])


def drive(
    machines: dict[str, Scripted],
    *,
    until: Callable[[], bool],
    disk_full: bool = False,
    posted: tuple[Event, ...] = (),
) -> list[str]:
    """Run a driver on recording handlers until a condition holds; return what was executed."""
    executed: list[str] = []

    async def save(effect: SaveState, post: Post) -> None:
        await asyncio.sleep(0)
        if disk_full:
            raise StorageError("no room", "enospc")
        executed.append(f"save {effect.key}")

    async def send(effect: SendRequest, post: Post) -> None:
        executed.append("send")
        post(RequestDone(effect.request_id, effect.peer_id))

    async def log(effect: Log, post: Post) -> None:
        executed.append(effect.text)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        driver = Driver(
            machines,
            {SaveState: save, SendRequest: send, Log: log, Count: log},
            monotonic=loop.time,
            wall_ms=lambda: 0,
        )
        task = asyncio.create_task(driver.run())
        for event in posted:
            await driver.show(event)
        async with asyncio.timeout(5):
            while not until():  # noqa: ASYNC110 - the condition is plain data, nothing signals it
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    return executed


def test_persisting_comes_before_sending_whatever_the_machine_said_first() -> None:
    request = SendRequest(1, PEER, GetHead(), 1.0)
    machine = Scripted({TimerFired: [Log("info", "logged"), request, SaveState("a", b"")]})
    executed = drive({"one": machine}, until=lambda: RequestDone(1, PEER) in machine.seen)
    assert executed[0] == "save a"
    assert set(executed) == {"save a", "send", "logged"}


def test_answers_reach_only_the_machine_that_asked() -> None:
    asking = Scripted({TimerFired: [SendRequest(7, PEER, GetHead(), 1.0)]})
    other = Scripted({})
    drive({"asking": asking, "other": other}, until=lambda: RequestDone(7, PEER) in asking.seen)
    assert not any(isinstance(event, RequestDone) for event in other.seen)


def test_broadcasts_reach_every_machine() -> None:
    one, two = Scripted({}), Scripted({})
    news = HeadSeen(b"head", None)
    drive({"one": one, "two": two}, until=lambda: True, posted=(news, PeerLost(PEER, "gone")))
    assert news in one.seen
    assert news in two.seen


@pytest.mark.parametrize(
    "event",
    [
        VoteSeen(b"vote", PEER),
        TermSeen((b"vote",), None),
        ContributionSeen(b"contribution", PEER),
        ReceiptSeen(b"receipt", (), PEER),
        StateReached(3, Digest(bytes(32))),
        StateLost(),
    ],
)
def test_news_of_rounds_reach_every_machine(event: Event) -> None:
    one, two = Scripted({}), Scripted({})
    drive({"one": one, "two": two}, until=lambda: True, posted=(event,))
    assert event in one.seen
    assert event in two.seen


def test_what_one_machine_shows_all_see_itself_included() -> None:
    event = StateReached(1, Digest(bytes(32)))
    one, two = Scripted({TimerFired: [ShowToMachines(event)]}), Scripted({})
    drive({"one": one, "two": two}, until=lambda: event in one.seen and event in two.seen)
    assert one.seen.count(event) == two.seen.count(event) == 1


async def test_nobody_waits_for_machines_that_are_gone() -> None:
    loop = asyncio.get_running_loop()
    driver = Driver({"one": Scripted({})}, {}, monotonic=loop.time, wall_ms=lambda: 0)
    task = asyncio.create_task(driver.run())
    await driver.settle("one")
    task.cancel()
    with pytest.raises(UnavailableError):
        await driver.show(HeadSeen(b"head", None))
    # A peer's request may come between the end of the machines and the moment when nobody is answered any more.
    for wait in (driver.show(HeadSeen(b"head", None)), driver.settle("one")):
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(wait, 5)


async def test_a_settled_machine_has_had_its_orders_begun() -> None:
    begun: list[str] = []
    machine = Scripted({TrainingLost: [Log("info", "ordered")]})

    async def log(effect: Log, post: Post) -> None:
        begun.append(effect.text)

    loop = asyncio.get_running_loop()
    driver = Driver({"one": machine}, {Log: log}, monotonic=loop.time, wall_ms=lambda: 0)
    task = asyncio.create_task(driver.run())
    driver.post_to("one", TrainingLost())
    await driver.settle("one")
    assert begun == ["ordered"]
    task.cancel()


def test_nothing_is_announced_that_could_not_be_stored() -> None:
    """A-PUB-2, A-DSK-1: a full disk stops the rest of the call and is told to the machine."""
    machine = Scripted({TimerFired: [SaveState("a", b""), SendRequest(1, PEER, GetHead(), 1.0)]})
    executed = drive({"one": machine}, until=lambda: len(machine.seen) > 1, disk_full=True)
    assert executed == []
    assert machine.seen[-1] == StoreFailed(None, "enospc")


def test_a_later_timer_replaces_the_earlier_one() -> None:
    fired: list[float] = []

    class Timed(Scripted):
        def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
            fired.append(now)
            return [SetTimer(now + 60), SetTimer(now)] if len(fired) < 3 else []

    drive({"one": Timed({})}, until=lambda: len(fired) >= 3)
    assert fired == sorted(fired)
