"""Rounds through a daemon, as a training loop meets them: they have the bits of rounds in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Trainer, run_locally, run_rounds

from pulsenet.errors import ConfigError, RemoteProtocolError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import protocol
from pulsenet.local import rounds_protocol as local
from pulsenet.local.client import Client
from pulsenet.node.effects import Fate
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training import daemon_link, join_rounds, round_work
from pulsenet.training.daemon_exchange import DaemonExchange
from pulsenet.training.exchange import Outcome
from pulsenet.wire.chunks import ChunkCutter

MakeDaemon = Callable[..., Any]
Connect = Callable[..., DaemonExchange]
SETTINGS = OuterSettings(inner_steps=3)
DDP = OuterSettings(algorithm=Algorithm.DDP, inner_steps=3)


def key(index: int) -> PeerId:
    return PeerId(bytes([index]) * 32)


@pytest.fixture
def make_run(make_daemon: MakeDaemon, connect: Connect, small_run: Any) -> Callable[..., tuple[Any, list[Trainer]]]:
    """Make trainers, each beside a daemon of its own, of one run."""

    def make(
        count: int, settings: OuterSettings = SETTINGS, *, late: int = 0, **fields: Any
    ) -> tuple[Any, list[Trainer]]:
        """``late`` nodes have no trainer yet."""
        daemons = [make_daemon(settings, peer_id=key(index)) for index in range(count + late)]
        run = small_run(daemons, **fields)
        run.live = set(range(count))
        return run, [Trainer(connect(daemon), seed=index) for index, daemon in enumerate(daemons[:count])]

    return make


MakeRun = Callable[..., tuple[Any, list[Trainer]]]


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_rounds_have_the_bits_of_rounds_in_one_process(make_run: MakeRun, algorithm: Algorithm) -> None:
    settings = OuterSettings(algorithm=algorithm, inner_steps=3)
    _, trainers = make_run(3, settings)
    run_rounds(trainers, 4)
    assert [trainer.bits() for trainer in trainers] == run_locally(3, 4, settings)
    assert {report.outcome for trainer in trainers for report in trainer.reports} == {Outcome.COUNTED}
    assert all(0 < report.payload_size_bytes < 1_000_000 for trainer in trainers for report in trainer.reports)
    assert {report.contributor_count for trainer in trainers for report in trainer.reports} == {3}


def test_a_trainer_that_is_away_for_rounds_makes_them_all_before_it_goes_on(make_run: MakeRun) -> None:
    run, trainers = make_run(3)
    run_rounds(trainers, 1)
    run.leave(2)
    run_rounds(trainers[:2], 3)
    run.live.add(2)
    for _ in range(3):
        trainers[2].train_step()
    assert trainers[2].reports[-1].outcome is Outcome.MISSED
    assert trainers[2].reports[-1].reason == "late"
    assert trainers[2].sync.round_index == 4
    assert len({trainer.shared_bits() for trainer in trainers}) == 1
    # The second missed round in a row gave up what was held back.
    assert trainers[2].sync.counters.resyncs == 1
    run_rounds(trainers, 1)
    assert len({trainer.shared_bits() for trainer in trainers}) == 1
    assert trainers[2].reports[-1].outcome is Outcome.COUNTED


@pytest.mark.parametrize("settings", [SETTINGS, DDP], ids=["pulseloco", "ddp"])
def test_a_joiner_replays_the_rounds_that_are_kept(
    make_run: MakeRun, connect: Connect, settings: OuterSettings
) -> None:
    run, trainers = make_run(2, settings, late=1)
    run_rounds(trainers, 3)
    run.live.add(2)
    trainers.append(Trainer(connect(run.daemons[2]), seed=2))
    assert trainers[2].sync.catch_up() == 3
    assert len({trainer.shared_bits() for trainer in trainers}) == 1
    run_rounds(trainers, 1)
    assert len({trainer.shared_bits() for trainer in trainers}) == 1


@pytest.mark.parametrize("why", ["forgotten", "other start"])
@pytest.mark.parametrize("settings", [SETTINGS, DDP], ids=["pulseloco", "ddp"])
def test_a_joiner_no_round_leads_on_takes_the_state_anchor(
    make_run: MakeRun, connect: Connect, why: str, settings: OuterSettings
) -> None:
    """Under ddp the anchor holds the inner optimizer's state as well, or the round after it would differ."""
    run, trainers = make_run(2, settings, late=1, anchor_interval=2)
    run_rounds(trainers, 5)
    run.live.add(2)
    trainers.append(Trainer(connect(run.daemons[2]), seed=2))
    joiner = trainers[2]
    if why == "forgotten":
        run.kept_from = 4
        joiner.sync._exchange._drop()
    else:
        theta = joiner.model[0].bias if settings is DDP else joiner.sync.state.theta[0]
        theta.data[0] += 1.0
        joiner.sync._stepper.refresh_root()
    assert run.anchor is not None
    assert run.anchor.round_index == 4
    assert joiner.sync.catch_up() == 5
    assert len({trainer.shared_bits() for trainer in trainers}) == 1
    assert joiner.sync.counters.resyncs == 1
    run_rounds(trainers, 1)
    assert len({trainer.shared_bits() for trainer in trainers}) == 1


def test_a_trainer_restored_from_an_older_round_counts_nothing_twice(make_run: MakeRun, connect: Connect) -> None:
    run, trainers = make_run(3)
    run_rounds(trainers, 2)
    saved = trainers[2].checkpoint()
    run_rounds(trainers, 3)
    before = [residual.clone() for residual in saved["sync"]["residual"].values()]
    trainers[2].sync._exchange.close()
    back = Trainer(connect(run.daemons[2]), seed=2)
    back.restore(saved)
    assert back.sync.catch_up() == 3
    assert len({trainer.shared_bits() for trainer in (*trainers[:2], back)}) == 1
    # What this trainer sent in those rounds has left the residual: it is in theta.
    kept = back.sync.state.residual
    assert any(not torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    assert all(bool(((b == a) | (b == 0)).all()) for a, b in zip(before, kept, strict=True))
    run_rounds([*trainers[:2], back], 1)
    assert len({trainer.shared_bits() for trainer in (*trainers[:2], back)}) == 1


def test_what_an_earlier_life_sent_is_what_counts(make_run: MakeRun, connect: Connect) -> None:
    """It died after it sent; the next life made other inner steps for the same round."""
    run, trainers = make_run(2)
    run_rounds(trainers, 1)
    saved = trainers[1].checkpoint()
    run.live = {0, 1, 2}  # nobody's contribution closes the round yet
    run.daemons.append(run.daemons[0].__class__(Path("/nowhere"), SETTINGS, peer_id=key(9)))
    errors: list[BaseException] = []

    def die() -> None:
        try:
            trainers[1].run_rounds(1)
        except UnavailableError as error:
            errors.append(error)

    trainers[1].sync._exchange._reconnect_seconds = 0.0
    dying = threading.Thread(target=die)
    dying.start()
    while key(1) not in run.offers:
        time.sleep(0.01)
    run.daemons[1].stop()
    dying.join(20)
    assert errors
    sent = run.offers[key(1)]
    run.daemons[1].start()
    back = Trainer(connect(run.daemons[1]), seed=77)
    back.restore(saved)
    back.sync._has_caught_up = True
    run.daemons.pop()
    run.live = {0, 1}
    run_rounds([trainers[0], back], 1)
    assert run.receipts[1].members[key(1)] == sent
    assert back.reports[-1].outcome is Outcome.COUNTED
    assert trainers[0].shared_bits() == back.shared_bits()


@pytest.mark.parametrize(
    "deadly",
    [
        local.OpenRounds,
        local.HoldState,
        local.PutBlobPart,
        local.OfferContribution,
        local.AwaitOrder,
        local.FetchBlobPart,
        local.Checked,
        local.Stepped,
        local.AnchorStored,
    ],
)
@pytest.mark.parametrize("has_heard", [False, True])
def test_a_daemon_that_dies_at_any_message_costs_nothing(make_run: MakeRun, deadly: type, has_heard: bool) -> None:
    """It is restarted each time; before or after it acted on the message."""
    run, trainers = make_run(2, anchor_interval=1)
    run_rounds(trainers, 1)
    daemon = run.daemons[0]
    deaths = 1

    def die(message: Any) -> None:
        nonlocal deaths
        if isinstance(message, deadly) and deaths:
            deaths -= 1
            if has_heard:
                run.hear(0, message)
            daemon.stop()
            threading.Timer(0.1, daemon.start).start()
            raise ConnectionError("died")
        run.hear(0, message)

    daemon.on_said = die
    if deadly in (local.OpenRounds, local.HoldState):
        trainers[0].sync._exchange._drop()
    run_rounds(trainers, 2)
    assert deaths == 0
    assert [trainer.bits() for trainer in trainers] == run_locally(2, 3, SETTINGS)
    assert {report.outcome for trainer in trainers for report in trainer.reports} == {Outcome.COUNTED}


@pytest.mark.parametrize("deadly", [local.OfferContribution, local.FetchBlobPart, local.Stepped, local.AnchorStored])
def test_under_ddp_too_a_daemon_that_dies_costs_nothing(make_run: MakeRun, deadly: type) -> None:
    run, trainers = make_run(2, DDP, anchor_interval=1)
    run_rounds(trainers, 1)
    daemon, deaths = run.daemons[0], [deadly]

    def die(message: Any) -> None:
        if deaths and isinstance(message, deaths[0]):
            deaths.clear()
            daemon.stop()
            threading.Timer(0.1, daemon.start).start()
            raise ConnectionError("died")
        run.hear(0, message)

    daemon.on_said = die
    run_rounds(trainers, 2)
    assert not deaths
    assert [trainer.bits() for trainer in trainers] == run_locally(2, 3, DDP)


def test_under_ddp_a_round_that_was_missed_is_stepped_by_the_others_mean(make_run: MakeRun) -> None:
    run, trainers = make_run(3, DDP)
    run_rounds(trainers, 1)
    run.leave(2)
    run_rounds(trainers[:2], 3)
    run.live.add(2)
    trainers[2].train_step()
    assert (trainers[2].reports[-1].outcome, trainers[2].reports[-1].reason) == (Outcome.MISSED, "late")
    assert len({trainer.shared_bits() for trainer in trainers}) == 1
    assert (trainers[2].sync.counters.resyncs, trainers[2].sync.counters.wasted_inner_steps) == (0, 1)
    run_rounds(trainers, 1)
    assert len({trainer.shared_bits() for trainer in trainers}) == 1
    assert trainers[2].reports[-1].outcome is Outcome.COUNTED


def test_under_ddp_a_trainer_goes_on_from_its_checkpoint(make_run: MakeRun, connect: Connect) -> None:
    run, trainers = make_run(2, DDP)
    run_rounds(trainers, 2)
    saved = trainers[1].checkpoint()
    run_rounds(trainers, 2)
    trainers[1].sync._exchange.close()
    back = Trainer(connect(run.daemons[1]), seed=1)
    back.restore(saved)
    assert back.sync.catch_up() == 2
    assert back.shared_bits() == trainers[0].shared_bits()


def test_a_daemon_that_stays_away_is_an_error_and_calling_again_goes_on(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    trainer = trainers[0]
    trainer.run_rounds(1)
    run.daemons[0].stop()
    trainer.sync._exchange._reconnect_seconds = 0.1
    for _ in range(2):
        trainer.train_step()
    with pytest.raises(UnavailableError, match="no daemon answers"):
        trainer.train_step()
    assert trainer.sync.state_dict()["pending"] is not None
    run.daemons[0].start()
    trainer.note(trainer.sync.step())
    trainer.steps_done += 1
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    assert trainer.sync.round_index == 2


def test_a_receipt_that_does_not_come_is_an_error_and_the_offer_is_not_made_twice(make_run: MakeRun) -> None:
    run, trainers = make_run(2)
    trainers[0].sync._exchange._order_seconds = 0.3
    for _ in range(2):
        trainers[0].train_step()
    with pytest.raises(UnavailableError, match="no order came in 0 s"):
        trainers[0].train_step()
    trainers[0].sync._exchange._order_seconds = 20.0
    thread = threading.Thread(target=lambda: trainers[0].note(trainers[0].sync.step()))
    thread.start()
    trainers[1].run_rounds(1)
    thread.join(20)
    assert trainers[0].reports[-1].outcome is Outcome.COUNTED
    assert run.daemons[0].kinds().count("OfferContribution") == 1
    assert trainers[0].shared_bits() == trainers[1].shared_bits()


def test_a_contribution_the_coordinator_refuses_is_rejected_with_its_reason(make_run: MakeRun) -> None:
    run, trainers = make_run(2)
    hear = run.hear

    def accuse(message: Any) -> None:
        offer = run.offers.get(key(1))
        if isinstance(message, local.Checked) and offer and message.contribution_digest == offer.blob_id:
            message = local.Checked(message.contribution_digest, "norm")
        hear(0, message)

    run.daemons[0].on_said = accuse
    kept = [residual.clone() for residual in trainers[1].sync.state.residual]
    run_rounds(trainers, 1)
    assert (trainers[1].reports[-1].outcome, trainers[1].reports[-1].reason) == (Outcome.REJECTED, "norm")
    assert all(torch.equal(a, b) for a, b in zip(kept, trainers[1].sync.state.residual, strict=True))
    assert trainers[0].shared_bits() == trainers[1].shared_bits()
    assert trainers[0].reports[-1].contributor_count == 1


def test_while_no_coordinator_is_heard_of_as_many_inner_steps_are_run_again(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    daemon = make_daemon()
    daemon.on_said = lambda message: (
        daemon.order(local.GoOn(0)) if isinstance(message, local.HoldState | local.OfferContribution) else None
    )
    trainer = Trainer(connect(daemon))
    for _ in range(6):
        trainer.train_step()
    assert [(report.outcome, report.reason) for report in trainer.reports] == [(Outcome.DEFERRED, "silent")] * 2
    assert trainer.sync.inner_step == 6
    assert trainer.sync.counters.deferred == 2


def test_a_full_disk_defers_and_says_why(make_daemon: MakeDaemon, connect: Connect) -> None:
    daemon = make_daemon()
    daemon.answers[local.PutBlobPart] = lambda message: local.BlobRefused("enospc")
    daemon.on_said = lambda message: (
        daemon.order(local.GoOn(0)) if isinstance(message, local.HoldState | local.AbstainRound) else None
    )
    trainer = Trainer(connect(daemon))
    for _ in range(3):
        trainer.train_step()
    assert daemon.last(local.AbstainRound) == local.AbstainRound(0, "enospc")
    assert (trainer.reports[-1].outcome, trainer.reports[-1].reason) == (Outcome.DEFERRED, "enospc")


def test_unfit_content_abstains_and_the_round_is_tried_again(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    trainer, daemon = trainers[0], run.daemons[0]
    hear = run.hear

    def retry(message: Any) -> None:
        hear(0, message)
        if isinstance(message, local.AbstainRound):
            daemon.order(local.GoOn(message.round_index))

    daemon.on_said = retry
    for _ in range(2):
        trainer.train_step()
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] = float("inf")
    trainer.train_step()
    assert (trainer.reports[-1].outcome, trainer.reports[-1].reason) == (Outcome.REJECTED, "finite")
    assert daemon.last(local.AbstainRound) == local.AbstainRound(0, "finite")
    assert (trainer.sync.round_index, trainer.sync.inner_step) == (0, 0)
    trainer.run_rounds(1)
    assert trainer.reports[-1].outcome is Outcome.COUNTED


def order_of(run: Any, **changes: Any) -> local.StepOrder:
    order = run.step_order(0, 1)
    fields = {name: getattr(order, name) for name in order.__slots__}
    return local.StepOrder(**{**fields, **changes})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run: {"base_state_root": Digest(bytes(32))}, "base"),
        (lambda run: {"round_index": 7}, "base"),
        (lambda run: {"members": run.step_order(0, 1).members[1:]}, "members"),
        (lambda run: {"fate": Fate.MISSED, "members": (*order_of(run).members, lost_member())}, "not-found"),
        (lambda run: {"members": tuple(scaled(member, 0x40000000) for member in order_of(run).members)}, "scale"),
        (lambda run: {"members": (order_of(run).members[0], broken_member(run))}, "decode"),
    ],
)
def test_a_step_that_cannot_be_made_moves_nothing_and_is_ordered_again(
    make_run: MakeRun, change: Any, reason: str
) -> None:
    run, trainers = make_run(2)
    run_rounds(trainers, 1)
    made = run.step_order
    daemon = run.daemons[0]
    wrong: list[local.StepOrder] = []

    def order_wrongly(index: int, round_index: int) -> local.StepOrder:
        if index == 0 and round_index == 1 and not wrong:
            run.step_order = made
            wrong.append(order_of(run, **change(run)))
            return wrong[0]
        return made(index, round_index)

    def order_again(message: Any) -> None:
        if isinstance(message, local.StepFailed):
            daemon.order(made(0, 1))
        run.hear(0, message)

    run.step_order, daemon.on_said = order_wrongly, order_again
    run_rounds(trainers, 1)
    assert wrong
    assert daemon.last(local.StepFailed) == local.StepFailed(wrong[0].round_index, reason)
    assert [trainer.bits() for trainer in trainers] == run_locally(2, 2, SETTINGS)


def lost_member() -> local.CountedMember:
    return local.CountedMember(key(200), 0x3F800000, Digest(bytes(32)), 10)


def scaled(member: local.CountedMember, scale_bits: int) -> local.CountedMember:
    return local.CountedMember(member.peer_id, scale_bits, member.blob_id, member.encoded_size_bytes)


def broken_member(run: Any) -> local.CountedMember:
    blob_id = run.daemons[0].put(b"no contribution")
    return local.CountedMember(key(1), 0x3F800000, blob_id, 15)


def test_a_step_that_was_done_before_is_only_answered_again(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    trainers[0].run_rounds(1)
    root = trainers[0].sync.state_root
    run.daemons[0].order(run.step_order(0, 0))
    trainers[0].run_rounds(1)
    answered = [message for message in run.daemons[0].said if isinstance(message, local.Stepped)]
    assert [message.round_index for message in answered] == [1, 1, 2]
    assert answered[1].state_root == root


def cut_elsewhere(order: local.CheckOrder, daemon: Any) -> Digest:
    """Hold a sound contribution under the id that it has when it is cut in another way."""
    cutter = ChunkCutter(100)
    cutter.feed(daemon.blobs[order.blob_id])
    cutter.finish()
    blob_id = cutter.chunk_list.blob_id
    daemon.blobs[blob_id] = daemon.blobs[order.blob_id]
    return blob_id


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda order, daemon: {"base_state_root": Digest(bytes(32))}, "base"),
        (lambda order, daemon: {"round_index": order.round_index + 1}, "base"),
        (lambda order, daemon: {"element_count": 7}, "shape"),
        (lambda order, daemon: {"entry_count": order.entry_count + 1}, "shape"),
        (lambda order, daemon: {"norm_bits": order.norm_bits ^ 1}, "norm"),
        (lambda order, daemon: {"blob_id": daemon.put(b"x" * 200), "encoded_size_bytes": 200}, "decode"),
        (lambda order, daemon: {"blob_id": cut_elsewhere(order, daemon)}, "decode"),
        (lambda order, daemon: {"blob_id": daemon.put(b"PLSC" + b"x" * 200), "encoded_size_bytes": 204}, "decode"),
    ],
)
def test_a_check_finds_what_its_record_and_blob_do_not_say(make_run: MakeRun, change: Any, reason: str) -> None:
    run, trainers = make_run(2)
    daemon = run.daemons[0]
    ask = run.ask

    def ask_wrongly(offer: local.OfferContribution, peer_id: PeerId) -> None:
        ask(offer, peer_id)
        if peer_id == key(1):
            order = daemon.orders[-1]
            fields = {name: getattr(order, name) for name in order.__slots__}
            changed = change(order, daemon)
            daemon.orders.insert(0, local.CheckOrder(**{**fields, **changed, "contribution_digest": Digest(bytes(32))}))

    run.ask = ask_wrongly
    run_rounds(trainers, 1)
    found = {m.contribution_digest: m.reason for m in daemon.said if isinstance(m, local.Checked)}
    assert found.pop(Digest(bytes(32))) == reason
    assert set(found.values()) == {""}


def test_a_blob_that_cannot_be_read_is_asked_for_again_before_the_connection_is_given_up(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_work, "READ_PAUSE_SECONDS", 0.0)
    run, trainers = make_run(2)
    left = 4

    def lose(message: local.FetchBlobPart) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            del run.daemons[0].answers[local.FetchBlobPart]
        return local.NoBlobPart("damaged")

    run.daemons[0].answers[local.FetchBlobPart] = lose
    run_rounds(trainers, 1)
    assert trainers[0].shared_bits() == trainers[1].shared_bits()
    # Three tries in vain cost the connection, and the state was told anew.
    assert run.daemons[0].kinds().count("HoldState") == 2


@pytest.mark.parametrize("fault", ["size", "bit", "header"])
def test_a_wrong_state_anchor_is_refused_and_the_state_stays(make_run: MakeRun, fault: str) -> None:
    run, trainers = make_run(1)
    trainer, daemon = trainers[0], run.daemons[0]
    trainer.run_rounds(1)
    before = trainer.bits()
    state, root = trainer.sync.state, trainer.sync.state_root
    header = b"PLSO" + bytes([1, 0, 0, 0]) + root + (1).to_bytes(8, "little")
    pairs = zip(state.theta, state.momentum, strict=True)
    body = bytearray(b"".join(theta.numpy().tobytes() + momentum.numpy().tobytes() for theta, momentum in pairs))
    size = 0
    if fault == "bit":
        body[5] ^= 1
    elif fault == "header":
        header = b"XXXX" + header[4:]
    else:
        size = 1
    blob = header + bytes(body)
    daemon.order(local.RestoreOrder(1, root, daemon.put(blob), len(blob) + size, True), local.GoOn(1))
    assert trainer.sync.catch_up() == 0
    reasons = {"size": "state-trailing", "bit": "root_mismatch", "header": "state-header"}
    assert daemon.last(local.RestoreRefused) == local.RestoreRefused(reasons[fault])
    assert trainer.bits() == before


def test_a_restoration_the_daemon_dies_in_is_made_again(make_run: MakeRun, connect: Connect) -> None:
    run, trainers = make_run(1, late=1, anchor_interval=1)
    trainers[0].run_rounds(2)
    trainers[0].sync.catch_up()
    run.live, run.kept_from = {0, 1}, 2
    daemon = run.daemons[1]
    fetches = 0

    def die(message: Any) -> None:
        nonlocal fetches
        if isinstance(message, local.FetchBlobPart):
            fetches += 1
            if fetches == 2:  # the first pass hashed it
                raise ConnectionError("died")
        run.hear(1, message)

    daemon.on_said = die
    joiner = Trainer(connect(daemon), seed=1)
    trainers.append(joiner)
    with pytest.raises(UnavailableError, match=r"broke off|closed the connection"):
        joiner.sync.catch_up()
    with pytest.raises(UnavailableError, match="not whole"):
        _ = joiner.sync.state_root
    report = joiner.sync.step()
    assert report is not None
    assert (report.outcome, report.round_index) == (Outcome.DROPPED, 2)
    assert daemon.last(local.HoldState) == local.HoldState(None, None)
    assert joiner.shared_bits() == trainers[0].shared_bits()
    run_rounds(trainers, 1)
    assert joiner.shared_bits() == trainers[0].shared_bits()


def test_an_anchor_of_another_round_or_on_a_full_disk_is_refused(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    daemon = run.daemons[0]
    trainers[0].run_rounds(1)
    daemon.order(local.AnchorOrder(0))
    trainers[0].run_rounds(1)
    assert daemon.last(local.AnchorRefused) == local.AnchorRefused(0, "round")
    daemon.answers[local.PutBlobPart] = lambda message: local.BlobRefused("enospc")
    daemon.order(local.AnchorOrder(2), local.GoOn(2))
    trainers[0].sync.catch_up()
    assert daemon.last(local.AnchorRefused) == local.AnchorRefused(2, "enospc")


def test_a_state_loaded_into_a_running_process_is_told_anew(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    trainers[0].run_rounds(1)
    saved = trainers[0].checkpoint()
    trainers[0].run_rounds(2)
    root = trainers[0].sync.state_root
    trainers[0].restore(saved)
    assert trainers[0].sync.catch_up() == 2
    assert trainers[0].sync.state_root == root
    held = [message for message in run.daemons[0].said if isinstance(message, local.HoldState)]
    assert [message.round_index for message in held] == [0, 1]


def test_catching_up_again_does_not_wait_for_what_was_said_already(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    trainers[0].run_rounds(2)
    asked = [message for message in run.daemons[0].said if isinstance(message, local.AwaitOrder)]
    for _ in range(3):
        assert trainers[0].sync.catch_up() == 0
    again = [message for message in run.daemons[0].said if isinstance(message, local.AwaitOrder)][len(asked) :]
    assert again == [local.AwaitOrder(0)] * 3


def test_news_of_rounds_that_are_over_is_awaited_for_a_moment(make_daemon: MakeDaemon, connect: Connect) -> None:
    daemon = make_daemon()
    exchange = connect(daemon, linger_seconds=0.4)
    trainer = Trainer(exchange)
    daemon.order(local.GoOn(0))
    timer = threading.Timer(0.1, lambda: daemon.order(local.AnchorOrder(0)))
    timer.start()
    assert trainer.sync.catch_up() == 0
    assert daemon.last(local.AnchorStored).round_index == 0


def refusal(code: str) -> Callable[[Any], protocol.LocalRefusal]:
    return lambda message: protocol.LocalRefusal(code, "detail")


@pytest.mark.parametrize(("code", "text"), [("no-rounds", "--algorithm"), ("not-trainer", "--role trainer")])
def test_a_run_without_rounds_says_what_to_do(make_daemon: MakeDaemon, code: str, text: str) -> None:
    """What cannot be made keeps no connection."""
    daemon = make_daemon()
    daemon.answers[local.GetRoundSettings] = refusal(code)
    client = Client.connect(daemon.directory)
    with pytest.raises(ConfigError, match=text):
        DaemonExchange(client)
    with pytest.raises(UnavailableError, match="this client is closed"):
        client.status()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("table", "other masters"),
        ("self-test", "arithmetic"),
        ("not-listed", "not listed"),
        ("busy", "another training process"),
    ],
)
def test_a_trainer_that_is_not_taken_says_why(
    make_daemon: MakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch, code: str, text: str
) -> None:
    monkeypatch.setattr(daemon_link, "BUSY_SECONDS_MAX", 0.3)
    daemon = make_daemon()
    daemon.answers[local.OpenRounds] = refusal(code)
    with pytest.raises(ConfigError, match=text):
        Trainer(connect(daemon))
    assert (daemon.kinds().count("OpenRounds") > 1) == (code == "busy")


def test_a_place_that_becomes_free_is_taken(make_daemon: MakeDaemon, connect: Connect) -> None:
    daemon = make_daemon()
    answers = [refusal("busy"), refusal("busy")]

    def refuse(message: Any) -> Any:
        return answers.pop()(message) if answers else local.RoundsOpened()

    daemon.answers[local.OpenRounds] = refuse
    Trainer(connect(daemon))
    assert daemon.kinds().count("OpenRounds") == 3


def test_changed_constants_are_refused(make_daemon: MakeDaemon, connect: Connect) -> None:
    daemon = make_daemon()
    trainer = Trainer(connect(daemon))
    trainer.sync._exchange._drop()
    daemon.settings = OuterSettings(inner_steps=9)
    with pytest.raises(ConfigError, match="changed the constants"):
        trainer.sync.catch_up()


def test_a_daemon_that_breaks_the_protocol_is_an_error_that_can_be_tried_again(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    daemon = run.daemons[0]
    trainers[0].run_rounds(1)
    daemon.answers[local.AwaitOrder] = lambda message: local.BlobTaken(None, 1)
    for _ in range(2):
        trainers[0].train_step()
    with pytest.raises(RemoteProtocolError, match="message-unexpected"):
        trainers[0].train_step()
    del daemon.answers[local.AwaitOrder]
    trainers[0].note(trainers[0].sync.step())
    assert trainers[0].reports[-1].outcome is Outcome.COUNTED


def test_a_residual_the_daemon_does_not_take_is_no_error(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    run.daemons[0].answers[local.TellResidual] = lambda message: local.BlobTaken(None, 1)
    trainers[0].run_rounds(2)
    assert [report.outcome for report in trainers[0].reports] == [Outcome.COUNTED] * 2


def test_a_move_that_raises_is_ordered_again_on_a_new_connection(make_run: MakeRun) -> None:
    run, trainers = make_run(1)
    trainer = trainers[0]
    step = trainer.sync._stepper.step

    def fail_once(final: Any, *, has_work: bool) -> None:
        trainer.sync._stepper.step = step
        raise MemoryError

    trainer.sync._stepper.step = fail_once
    with pytest.raises(MemoryError):
        trainer.run_rounds(1)
    trainer.note(trainer.sync.step())
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    assert run.daemons[0].kinds().count("HoldState") == 2
    assert trainer.bits() == run_locally(1, 1, SETTINGS)[0]


def test_an_order_that_was_interrupted_is_given_again(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user stops a notebook's cell while a contribution is looked into, and goes on."""
    _, trainers = make_run(1)
    trainer = trainers[0]

    def interrupt_once(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(round_work.RoundWork, "check", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        trainer.run_rounds(1)
    trainer.note(trainer.sync.step())
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    assert trainer.bits() == run_locally(1, 1, SETTINGS)[0]


def test_theta_elsewhere_is_read_tensor_by_tensor(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where theta lies on an accelerator: what is read is a copy."""
    _, trainers = make_run(2)
    for trainer in trainers:
        stepper = trainer.sync._stepper
        read = stepper.theta
        monkeypatch.setattr(stepper, "theta", lambda index, read=read: read(index).copy())
    run_rounds(trainers, 3)
    assert [trainer.bits() for trainer in trainers] == run_locally(2, 3, SETTINGS)


def test_the_convenience_finds_the_daemon(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon()
    with pytest.raises(ConfigError, match="pulsenet join"):
        join_rounds(data_dir=tmp_path / "nobody")
    exchange = join_rounds(data_dir=daemon.directory, spool_directory=tmp_path)
    assert exchange is not None
    with exchange:
        assert exchange.settings == daemon.settings
    exchange.close()


def test_each_round_is_handed_over_and_only_the_coordinators_is_copied(make_run: MakeRun, make_daemon: Any) -> None:
    run, trainers = make_run(1)
    daemon = run.daemons[0]
    refused = protocol.PublishDone(protocol.PublishStatus.NOT_PUBLISHER, None, 0, 0, 0, 0, "not the coordinator")
    daemon.answers[protocol.OfferSnapshot] = lambda message: refused
    trainers[0].sync._exchange.close()
    exchange = join_rounds(data_dir=daemon.directory)
    assert exchange is not None
    with exchange:
        exchange._linger_seconds = 0.0
        trainer = Trainer(exchange)
        trainer.run_rounds(2)
        offers = [message for message in daemon.said if isinstance(message, protocol.OfferSnapshot)]
        assert [offer.trainer_step for offer in offers] == [1, 2]
        assert not any(isinstance(message, protocol.SnapshotPart) for message in daemon.said)
        assert exchange.last_publish is not None
        assert exchange.last_publish.status is protocol.PublishStatus.NOT_PUBLISHER


def test_a_model_that_cannot_be_published_says_how_to_train_without(make_run: MakeRun) -> None:
    """Adapters that are not merged, say: a round leaves no time to merge them."""
    run, trainers = make_run(1)
    trainers[0].sync._exchange.close()
    for publish in (True, False):
        exchange = join_rounds(data_dir=run.daemons[0].directory, publish=publish)
        assert exchange is not None
        with exchange:
            exchange._linger_seconds = 0.0
            trainer = Trainer(exchange)
            trainer.model[0].lora_A = torch.nn.Linear(1, 1)
            if publish:
                with pytest.raises(ConfigError, match=r"adapter tensors .*; to train without .*publish=False"):
                    trainer.run_rounds(1)
            else:
                trainer.run_rounds(2)


def test_a_spool_without_room_fails_the_step_and_moves_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run, trainers = make_run(2)
    missing = tmp_path / "missing"
    trainers[0].sync._exchange._work._spool_directory = missing
    daemon = run.daemons[0]

    def make_room(message: Any) -> None:
        if isinstance(message, local.StepFailed):
            missing.mkdir()
            daemon.order(run.step_order(0, 0))
        run.hear(0, message)

    daemon.on_said = make_room
    run_rounds(trainers, 1)
    assert daemon.last(local.StepFailed) == local.StepFailed(0, "io")
    assert trainers[0].shared_bits() == trainers[1].shared_bits()
    assert list(missing.iterdir()) == []


def test_a_step_that_fails_again_and_again_is_an_error_with_its_reason(make_run: MakeRun, tmp_path: Path) -> None:
    run, trainers = make_run(1)
    trainer, daemon = trainers[0], run.daemons[0]
    missing = tmp_path / "missing"
    trainer.sync._exchange._work._spool_directory = missing
    trainer.sync._exchange._order_seconds = 0.3

    def order_again(message: Any) -> None:
        if isinstance(message, local.StepFailed):
            time.sleep(0.01)
            daemon.order(run.step_order(0, 0))
        run.hear(0, message)

    daemon.on_said = order_again
    for _ in range(trainer.sync.settings.inner_steps - 1):
        trainer.train_step()
    with pytest.raises(UnavailableError, match=f"round 0 is not stepped: .*{missing}"):
        trainer.train_step()
    missing.mkdir()
    trainer.note(trainer.sync.step())
    assert trainer.reports[-1].outcome is Outcome.COUNTED
