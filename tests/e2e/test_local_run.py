"""One private run on one machine: twelve versions, three nodes, and everything that can fall over."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from free_ports import find_free_port
from swarm import Gate, Node, Swarm, run_command, run_json, wait_until
from synthetic import MEGABYTE, SyntheticModel, connect

from pulsenet.ids import Version
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.subscriber import Subscriber, attach_engine

pytestmark = pytest.mark.e2e

ANCHOR_SIZE_BYTES = 24 * MEGABYTE
HELD_AFTER_BYTES = 9 * MEGABYTE
LEAVE_SECONDS_MAX = 15.0
NOBODY = "12D3KooWELH8s3aTF93abUfQZ7LbLzCayr9Qjv9A5P5AugqPN2cn"
"""A well-formed key that no node of these tests has."""

BACKGROUND_WORDS = ("Traceback", "error:", "exception was never retrieved", "Task was destroyed")
"""What an operator must not see while nothing but the expected happens."""


@dataclass
class Story:
    """What was seen while the run lived; the tests judge it."""

    trainer: Node
    first: Node
    second: Node
    model: SyntheticModel
    engine: FilesEngine
    subscriber: Subscriber = field(init=False)
    seen: dict[str, Any] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(swarm: Swarm) -> Iterator[Story]:
    # Nodes meet through the gate only, so that a download can be caught in its middle.
    gate = Gate()
    told = Story(
        trainer=swarm.add("trainer", "trainer", *gate.relay()),
        first=swarm.add("first", "inferencer", *gate.relay()),
        second=swarm.add("second", "inferencer", *gate.relay()),
        model=SyntheticModel(ANCHOR_SIZE_BYTES),
        engine=FilesEngine(swarm.home("engine")),
    )
    try:
        _begin(told)
        _kill_in_the_middle_of_a_fetch(told, gate)
        _go_to_version_twelve(told)
        _kill_the_trainer(told)
        _ask_for_what_is_refused(told, swarm)
        _damage_the_run_directory(told, swarm)
        _leave_in_the_middle_of_a_fetch(told, gate)
        yield told
    finally:
        gate.close()


def _begin(told: Story) -> None:
    """The inferencer is there before anybody it could follow."""
    told.first.start()
    told.seen["waiting"] = told.first.wait_log("waiting for")
    told.trainer.start().wait_ready()
    told.first.wait_ready()
    told.first.wait_status("the trainer is connected", lambda status: status["peers"] >= 1)
    told.seen["health before"] = (told.first.get("/livez"), told.first.get("/readyz"), told.first.status)


def _kill_in_the_middle_of_a_fetch(told: Story, gate: Gate) -> None:
    gate.hold_after(HELD_AFTER_BYTES)
    with connect(told.trainer.data_dir) as client:
        told.numbers.append(told.model.publish_step(client))
    wait_until("the download is caught in its middle", lambda: gate.is_holding)
    status = told.first.wait_status("chunks are stored", lambda status: status["store_bytes"] > 0)
    told.seen["health in the middle"] = (told.first.get("/livez"), told.first.get("/readyz"), status)
    orphans = told.first.find_p2pd()
    told.first.kill()
    killed_at = time.monotonic()
    told.seen["stored at the kill"] = _measure_chunks(told.first)
    told.first.start().wait_ready()
    told.seen["seconds to come back"] = time.monotonic() - killed_at
    gate.release()
    told.first.wait_applied(1)
    told.seen["bytes of the second life"] = told.first.status["bytes"]
    told.seen["orphans"] = [pid for pid in orphans if pid in told.first.find_p2pd()]
    # A process of the user's own, which lives through every restart of the daemon that feeds it.
    told.subscriber = attach_engine(told.engine, data_dir=told.first.data_dir)
    told.subscriber.start()
    told.seen["health after"] = (told.first.get("/livez"), told.first.get("/readyz"), told.first.status)


def _measure_chunks(node: Node) -> int:
    """Return the bytes of chunks that are whole on disk."""
    files = [path for path in (node.data_dir / "chunks").rglob("*") if path.is_file() and path.suffix == ""]
    return sum(path.stat().st_size for path in files)


def _go_to_version_twelve(told: Story) -> None:
    with connect(told.trainer.data_dir) as client:
        for _ in range(2, 8):
            told.numbers.append(told.model.publish_step(client))
        told.second.start().wait_ready()
        for _ in range(8, 11):
            told.numbers.append(told.model.publish_step(client))
        (victim,) = told.first.find_p2pd()
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until("/readyz notices that p2pd is gone", lambda: told.first.get("/readyz")[0] == 503, 10)
        told.seen["seconds to notice p2pd"] = time.monotonic() - killed_at
        for _ in range(11, 13):
            told.numbers.append(told.model.publish_step(client))
    for node in (told.first, told.second):
        node.wait_applied(12)
    told.seen["p2pd restarts"] = told.first.status["p2pd_restarts"]
    others = {node.status["peer_id"] for node in (told.trainer, told.first)}
    # A node looks at its peers every few seconds.
    wait_until("others are seen", lambda: others <= {one["peer_id"] for one in told.second.status["peer_list"]}, 30)
    told.seen["page"] = told.second.get("/")
    told.seen["status of the page"] = json.loads(told.second.get("/status?history&log")[1])
    told.seen["peers of the page"] = others
    told.seen["roots"] = [node.read_root(12) for node in (told.trainer, told.first, told.second)]
    told.seen["expected root"] = told.model.root
    told.seen["files"] = [
        run_json("verify", str(node.data_dir / "weights" / "current"), home=node.data_dir)["root"]
        for node in (told.first, told.second)
    ]


def _kill_the_trainer(told: Story) -> None:
    """Between two publishes, under a training loop that goes on with the connection it has."""
    with connect(told.trainer.data_dir) as client:
        told.model.step()
        told.model.publish(client, wait=False)
        told.trainer.kill()
        told.model.step()
        told.seen["publish to the dead"] = told.model.publish(client, wait=False)
        age = told.first.status["version_age_seconds"]
        told.seen["age grows"] = told.first.wait_status(
            "the age of the version grows", lambda status: status["version_age_seconds"] > age
        )
        told.trainer.start()
        # Waits for the daemon by itself.
        told.seen["after the restart"] = told.model.publish_step(client)
    for node in (told.first, told.second):
        node.wait_applied(told.seen["after the restart"])
    told.seen["epoch"] = told.trainer.status["latest_seen_epoch"]
    told.seen["roots at last"] = [
        node.read_root(told.seen["after the restart"]) for node in (told.trainer, told.first, told.second)
    ]


def _ask_for_what_is_refused(told: Story, swarm: Swarm) -> None:
    home = swarm.home()
    told.seen["owner"] = told.first.pid
    before = _list_files(told.first.data_dir)
    told.seen["second instance"] = run_command(
        "join", "--role", "inferencer", "--data-dir", str(told.first.data_dir), home=home
    )
    told.seen["files touched"] = _list_files(told.first.data_dir) ^ before
    file = json.loads((home / "pulsenet" / "local" / "run.json").read_text())
    trainer_address, _, _ = next(one for one in file["bootstraps"]).partition("/p2p/")
    stranger = told.first.status["peer_id"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told.seen["bootstraps"] = {
            "refused": f"/ip4/127.0.0.1/tcp/{find_free_port()}/p2p/{stranger}",
            "silent": f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{told.second.status['peer_id']}",
            "other key": f"{trainer_address}/p2p/{NOBODY}",
        }
        told.seen["no bootstrap"] = run_command(
            "join",
            "--role=inferencer",
            f"--token={file['token']}",
            "--start-timeout-seconds=15",
            *(f"--bootstrap={address}" for address in told.seen["bootstraps"].values()),
            home=swarm.home("elsewhere"),
        )
    told.seen["endpoints"] = [node.metrics_url for node in (told.trainer, told.first, told.second)]
    told.seen["listening"] = {url: _find_listening_hosts(int(url.rpartition(":")[2])) for url in told.seen["endpoints"]}


def _list_files(directory: Path) -> set[tuple[str, int]]:
    """Return names and inodes of the files that tell whether a store was touched."""
    names = ("lock", "node.json", "identity.key", "store.sqlite", "local/daemon.sock")
    return {(name, (directory / name).stat().st_ino) for name in names}


def _find_listening_hosts(port: int) -> set[str]:
    """Return the hosts on which somebody listens at this port, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            host, _, text = line.split()[1].partition(":")
            if int(text, 16) == port and line.split()[3] == "0A":
                found.add(host)
    return found


def _damage_the_run_directory(told: Story, swarm: Swarm) -> None:
    """Somebody's editor, or a disk, leaves something that is no revision where running nodes look for one."""
    damaged = swarm.home() / "pulsenet" / "local" / "descriptors" / "000007.record"
    damaged.write_bytes(b"not a record")
    told.first.wait_log("000007.record is damaged")
    damaged.unlink()


def _leave_in_the_middle_of_a_fetch(told: Story, gate: Gate) -> None:
    """One is told to stop, one sees Ctrl-C in its terminal, one sees it twice."""
    gate.hold_after(HELD_AFTER_BYTES)
    renewed = SyntheticModel(ANCHOR_SIZE_BYTES, seed=8)
    with connect(told.trainer.data_dir) as client:
        told.seen["renewed"] = renewed.publish_step(client)
    wait_until("the download is caught in its middle", lambda: gate.is_holding)
    told.seen["SIGTERM"] = (*told.first.stop(), told.first.find_p2pd(), told.first.find_sockets())
    started = time.monotonic()
    told.second.send_signal(signal.SIGINT, group=True)
    code = told.second.wait_exit(20)
    seconds = time.monotonic() - started
    told.seen["Ctrl-C"] = (code, seconds, told.second.find_p2pd(), told.second.find_sockets())
    gate.release()
    told.first.start().wait_ready()
    told.first.wait_applied(told.seen["renewed"])
    wait_until("the engine outside follows", lambda: told.engine.version == Version(0, told.seen["renewed"]))
    told.subscriber.close()
    told.seen["engine's files"] = run_json("verify", str(told.engine.current), home=told.first.data_dir)["root"]
    told.engine.close()
    told.seen["renewed roots"] = {renewed.root, told.first.read_root(told.seen["renewed"])}
    told.trainer.send_signal(signal.SIGINT)
    told.trainer.wait_log("a second signal ends the node at once")
    started = time.monotonic()
    told.trainer.send_signal(signal.SIGINT)
    code = told.trainer.wait_exit(20)
    seconds = time.monotonic() - started
    told.seen["Ctrl-C twice"] = (code, seconds, told.trainer.find_p2pd(), told.trainer.find_sockets())


def test_an_inferencer_started_first_says_what_it_waits_for(story: Story) -> None:
    assert "waiting for 'pulsenet join --role trainer' on this machine" in story.seen["waiting"]
    assert "Traceback" not in story.seen["waiting"]


def test_a_node_is_live_from_the_start_and_ready_after_its_first_version(story: Story) -> None:
    """A-OBS-4."""
    for moment in ("health before", "health in the middle"):
        live, ready, status = story.seen[moment]
        assert live[0] == 200
        assert ready[0] == 503
        assert "[-] a version was verified and applied" in ready[1]
        assert status["applied_version"] is None
    live, ready, _ = story.seen["health after"]
    assert (live[0], ready[0]) == (200, 200)


def test_lag_is_never_zero_because_nothing_is_known(story: Story) -> None:
    """A-OBS-2."""
    assert story.seen["health before"][2]["version_lag"] is None
    assert story.seen["health in the middle"][2]["latest_seen_version"] == 1
    assert story.seen["health in the middle"][2]["version_lag"] != 0
    grown = story.seen["age grows"]
    assert grown["latest_seen_version"] == 12


def test_a_download_killed_in_its_middle_goes_on_where_it_was(story: Story) -> None:
    """A-CHK-4, A-PROC-3."""
    stored = story.seen["stored at the kill"]
    assert 0 < stored < ANCHOR_SIZE_BYTES
    fetched = story.seen["bytes of the second life"]["received_chunk"]
    assert fetched <= 1.05 * (story.model.table.layout_size_bytes - stored)
    assert story.seen["orphans"] == []


def test_all_end_at_version_twelve_with_equal_roots(story: Story) -> None:
    assert story.numbers == list(range(1, 13))
    assert set(story.seen["roots"]) == {story.seen["expected root"]}
    assert set(story.seen["files"]) == {story.seen["expected root"]}


def test_p2pd_comes_back_by_itself(story: Story) -> None:
    """A-PROC-1."""
    assert story.seen["p2pd restarts"] == 1
    assert story.seen["seconds to notice p2pd"] <= 5


def test_a_killed_trainer_continues_the_chain_and_loses_nothing(story: Story) -> None:
    """A-PUB-1, A-PUB-3."""
    assert story.seen["publish to the dead"].status == "failed"
    assert story.seen["after the restart"] in (13, 14)
    assert set(story.seen["roots at last"]) == {story.model.root}
    assert story.seen["epoch"] == 0


@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("Ctrl-C", 130)])
def test_a_node_told_to_stop_in_a_download_leaves_nothing_behind(story: Story, how: str, code: int) -> None:
    """A-PROC-2, A-CLI-4."""
    found, seconds, p2pd, sockets = story.seen[how]
    assert found == code
    assert seconds <= LEAVE_SECONDS_MAX
    assert p2pd == []
    assert sockets == []


def test_a_stopped_download_is_finished_at_the_next_start(story: Story) -> None:
    """A-PROC-2."""
    assert len(story.seen["renewed roots"]) == 1


def test_an_engine_in_a_process_of_its_own_outlives_its_daemon(story: Story) -> None:
    assert story.seen["engine's files"] in story.seen["renewed roots"]
    assert story.subscriber.last_failure is None


def test_a_second_ctrl_c_ends_a_node_at_once(story: Story) -> None:
    """A-CLI-4."""
    code, seconds, p2pd, sockets = story.seen["Ctrl-C twice"]
    assert code == 130
    assert seconds <= 1
    assert p2pd == []
    assert sockets == []


def test_a_second_instance_names_the_owner_and_touches_nothing(story: Story) -> None:
    """A-PROC-4."""
    refused = story.seen["second instance"]
    assert refused.returncode == 4
    assert str(story.seen["owner"]) in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert story.seen["files touched"] == set()


def test_unreachable_bootstraps_are_named_one_by_one_with_their_reasons(story: Story) -> None:
    """A-NET-1."""
    failed = story.seen["no bootstrap"]
    assert failed.returncode == 3, failed.stderr
    assert "Traceback" not in failed.stderr
    reasons = {}
    for kind, address in story.seen["bootstraps"].items():
        lines = [line for line in failed.stderr.splitlines() if address in line]
        assert len(lines) == 1, failed.stderr
        reasons[kind] = lines[0].partition(address)[2]
    assert len(set(reasons.values())) == 3, reasons
    assert "refused" in reasons["refused"]
    assert "--wait" in failed.stderr.splitlines()[-1]


def test_the_endpoint_is_open_to_this_machine_only(story: Story) -> None:
    """A-OBS-5."""
    for url in story.seen["endpoints"]:
        assert url.startswith("http://127.0.0.1:")
        assert story.seen["listening"][url] == {"0100007F"}


def test_nothing_frightening_is_printed_by_nodes_that_work(story: Story) -> None:
    """A-CLI-5."""
    for node in (story.trainer, story.first, story.second):
        lines = [line for line in node.log.splitlines() if any(word in line for word in BACKGROUND_WORDS)]
        assert lines == [], node.name


def test_the_status_page_shows_what_the_node_did(story: Story) -> None:
    code, page = story.seen["page"]
    assert code == 200
    status = story.seen["status of the page"]
    for text in ("pulsenet", "0.12", status["conditions"][0]["title"], "version 0.12 is in DATA-DIR"):
        assert text in page
    assert str(story.second.data_dir) not in page
    assert status["history"]["times_ms"]
    assert status["log"]["lines"]
    by_peer = {peer["peer_id"]: peer["received_bytes"] for peer in status["peer_list"]}
    assert story.seen["peers of the page"] <= by_peer.keys()
    assert sum(by_peer.values()) > 0
