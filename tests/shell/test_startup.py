"""What a node settles before it touches the network: run, directory, key."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Descriptor
from pulsenet.chain.token import encode_token
from pulsenet.chain.trust import Trust
from pulsenet.errors import ConfigError, UsageError
from pulsenet.local.directories import list_nodes
from pulsenet.outer.settings import OuterSettings
from pulsenet.wire.schema import decode_value
from pulsenetd import runs, startup
from pulsenetd.config import Config
from pulsenetd.errors import DirectoryLockedError
from pulsenetd.identity import verify
from pulsenetd.startup import EVERYWHERE, LOOPBACK, Settled, settle
from pulsenetd.storage.store import Store

NOW_MS = 1_800_000_000_000
PEER = "12D3KooWELH8s3aTF93abUfQZ7LbLzCayr9Qjv9A5P5AugqPN2cn"


def never(seconds: float) -> None:
    raise AssertionError("nothing is to be waited for")


class Machine:
    """One machine's data home, on which nodes settle."""

    def __init__(self, home: Path) -> None:
        self.home = home / "pulsenet"
        self.environment = {"XDG_DATA_HOME": str(home)}
        self.said: list[str] = []
        self.settled: list[Settled] = []

    def settle(self, sleep: Callable[[float], None] = never, **changes: Any) -> Settled:
        settled = settle(Config(**changes), self.environment, say=self.said.append, now_ms=lambda: NOW_MS, sleep=sleep)
        self.settled.append(settled)
        return settled

    def write_run(self, name: str, token: Any) -> Path:
        path = self.home / name / "run.json"
        runs.write_run_file(path, runs.RunFile(name, token, ()))
        return path

    def descriptor(self, name: str = "local") -> Descriptor:
        (genesis,) = runs.load_descriptors(self.home / name)
        return decode_value(Descriptor, genesis.payload)

    def close(self) -> None:
        for settled in self.settled:
            settled.lock.release()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "home")
    yield made
    made.close()


# The private run


def test_the_first_trainer_opens_the_private_run_and_publishes_in_it(machine: Machine) -> None:
    node = machine.settle()
    assert (node.run_name, node.is_local, node.listen_address) == ("local", True, LOOPBACK)
    assert node.data_directory == machine.home / "local" / "trainer"
    assert node.run_file == machine.home / "local" / "run.json"
    descriptor = machine.descriptor()
    assert descriptor.authorities == (node.identity.peer_id,)
    assert descriptor.private
    assert len(node.token.secret) == 16
    trust = Trust(node.token.run_id, verify)
    trust.accept_descriptor(runs.load_descriptors(machine.home / "local")[0])
    assert machine.said == []


def test_a_restarted_trainer_finds_its_run_directory_and_key_again(machine: Machine) -> None:
    first = machine.settle()
    machine.close()
    again = machine.settle()
    assert (again.token, again.data_directory) == (first.token, first.data_directory)
    assert again.identity.peer_id == first.identity.peer_id


def test_nodes_of_one_role_take_the_first_free_directory(machine: Machine) -> None:
    first, second, third = (machine.settle() for _ in range(3))
    assert [node.data_directory.name for node in (first, second, third)] == ["trainer", "trainer-2", "trainer-3"]
    assert len({node.identity.peer_id for node in machine.settled}) == 3
    assert {node.token.run_id for node in machine.settled} == {first.token.run_id}
    second.lock.release()
    assert machine.settle().data_directory.name == "trainer-2"
    assert machine.settle(role="inferencer").data_directory.name == "inferencer"


def test_two_trainers_that_race_open_one_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    load = runs.load_descriptors
    both_looked = threading.Barrier(2)

    def load_and_let_the_other_look(path: Path) -> Any:
        found = load(path)
        if not found:
            # Broken is what is hoped for: the other one has to wait for us.
            with contextlib.suppress(threading.BrokenBarrierError):
                both_looked.wait(timeout=0.3)
        return found

    monkeypatch.setattr(runs, "load_descriptors", load_and_let_the_other_look)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: machine.settle(), range(2))
    assert one.token == other.token
    assert machine.descriptor().authorities in ((one.identity.peer_id,), (other.identity.peer_id,))


def test_a_run_whose_file_a_crash_left_out_is_opened_all_the_same(machine: Machine) -> None:
    first = machine.settle()
    machine.close()
    first.run_file.unlink()
    again = machine.settle()
    assert again.token.run_id == first.token.run_id
    assert machine.said == []


def test_a_directory_that_others_may_write_in_is_told_and_used(machine: Machine, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for mode, is_told in ((0o777, True), (0o1777, True), (0o755, False), (0o2775, False)):
        shared.mkdir(exist_ok=True)
        shared.chmod(mode)
        machine.settle(role="trainer", data_dir=str(shared)).lock.release()
        assert [str(shared) in said and "chmod 700" in said for said in machine.said] == [True] * is_told
        machine.said.clear()


def test_a_directory_of_another_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert startup.find_directory_risk(tmp_path) == ""
    owner = tmp_path.stat().st_uid
    if owner == 0:  # only root can give a directory away; to others, root's own are no risk
        os.chown(tmp_path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "belongs to user" in startup.find_directory_risk(tmp_path)


def test_an_inferencer_started_first_waits_for_the_run_and_says_so_once(machine: Machine) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            machine.settle()

    node = machine.settle(sleep, role="inferencer")
    assert machine.said == ["waiting for 'pulsenet join --role trainer' on this machine"]
    assert len(waited) == 3
    assert node.token == machine.settled[0].token


# Runs with a name or a token


def test_a_token_names_the_run_by_its_id_and_writes_the_run_file(machine: Machine, run: Any) -> None:
    node = machine.settle(token=encode_token(run.token), role="seed")
    name = run.run_id.hex()[:16]
    assert (node.run_name, node.token, node.is_local) == (name, run.token, False)
    assert node.listen_address == EVERYWHERE
    assert runs.read_run_file(node.run_file) == runs.RunFile(name, run.token, ())
    assert machine.settle(run=name).token == run.token, "the second node of the machine needs no token"


def test_a_run_may_be_named_on_this_machine(machine: Machine, run: Any) -> None:
    node = machine.settle(token=encode_token(run.token), run="theirs")
    assert node.data_directory == machine.home / "theirs" / "trainer"


def test_one_name_never_stands_for_two_runs(machine: Machine, run: Any, make_run: Any) -> None:
    other = make_run(nonce=b"n" * 16)
    machine.settle(token=encode_token(run.token), run="theirs")
    with pytest.raises(ConfigError, match="'theirs' is another run"):
        machine.settle(token=encode_token(other.token), run="theirs")
    assert not (machine.home / "theirs" / "trainer-2").exists()


def test_a_run_file_says_name_and_token(machine: Machine, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    runs.write_run_file(path, runs.RunFile("theirs", run.token, ()))
    node = machine.settle(run_file=str(path), role="inferencer")
    assert (node.run_name, node.token, node.is_local) == ("theirs", run.token, False)
    assert node.run_file.exists()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"token": "pulse1x", "run_file": "x"}, UsageError, "not both"),
        ({"token": "pulse2abc"}, UsageError, "--token: a join token starts with"),
        ({"token": "pulse1abc"}, UsageError, "copied whole"),
        ({"run_file": "/nowhere/run.json"}, ConfigError, "there is no run file /nowhere/run.json"),
        ({"run": "typo"}, ConfigError, "no run 'typo' on this machine; give --token"),
    ],
)
def test_what_names_no_run_is_refused_and_leaves_nothing_behind(
    machine: Machine, changes: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        machine.settle(**changes)
    assert not machine.home.exists()


def test_a_damaged_run_file_is_named(machine: Machine, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text('{"name": "theirs", "token": "pulse1"}')
    with pytest.raises(ConfigError, match=r"given\.json is not a run file"):
        machine.settle(run_file=str(path))
    runs.write_run_file(path, runs.RunFile("../../elsewhere", run.token, ()))
    with pytest.raises(ConfigError, match="is not a run name"):
        machine.settle(run_file=str(path))
    own = machine.write_run("mine", run.token)
    own.write_text("no JSON")
    with pytest.raises(ConfigError, match=r"run\.json is not a run file .*; delete it, then join with --token again"):
        machine.settle(run="mine")


def test_a_damaged_file_of_the_local_run_is_made_anew_by_its_trainer(machine: Machine) -> None:
    """Nobody has a token of it that one could join with again."""
    run_id = machine.settle(role="trainer").token.run_id
    path = machine.home / "local" / "run.json"
    path.write_text("no JSON")
    with pytest.raises(ConfigError, match="delete it, then start a trainer of the run: it makes another"):
        machine.settle(role="seed")
    path.unlink()
    assert machine.settle(role="trainer").token.run_id == run_id


def test_an_expired_token_is_refused(machine: Machine, run: Any) -> None:
    still = replace(run.token, expires_at_ms=NOW_MS)
    assert machine.settle(token=encode_token(still)).token == still
    expired = replace(run.token, expires_at_ms=NOW_MS - 1)
    with pytest.raises(ConfigError, match="has expired"):
        machine.settle(token=encode_token(expired), run="late")
    assert not (machine.home / "late").exists()
    machine.write_run("late", expired)
    with pytest.raises(ConfigError, match="has expired"):
        machine.settle(run="late")


def test_who_joined_before_the_token_expired_starts_again(machine: Machine, run: Any, make_run: Any) -> None:
    """The run's own trainer among them: there is no other token for it."""
    expired = replace(run.token, expires_at_ms=NOW_MS - 1)
    machine.write_run("mine", expired)
    runs.save_descriptor(machine.home / "mine", run.genesis)
    assert machine.settle(run="mine").token == expired
    assert machine.settle(run="mine").has_token_ended
    assert machine.settle(run="mine", token=encode_token(expired), role="seed").token == expired
    other = make_run(nonce=b"n" * 16)
    runs.save_descriptor(machine.home / "theirs", other.genesis)
    with pytest.raises(ConfigError, match="has expired"):
        machine.settle(run="theirs", token=encode_token(expired))


def test_a_token_that_ends_later_takes_the_place_of_the_one_that_was_kept(machine: Machine, run: Any) -> None:
    """Else the machine shows the one that ended, to its people and to those whom they ask in."""
    kept = machine.write_run("mine", replace(run.token, expires_at_ms=NOW_MS - 1))
    live = ("/ip4/10.0.0.1/tcp/4001/p2p/" + PEER,)
    runs.write_run_file(kept, replace(runs.read_run_file(kept), bootstraps=live))
    runs.save_descriptor(machine.home / "mine", run.genesis)
    later = replace(run.token, expires_at_ms=NOW_MS + 1, bootstraps=("/ip4/10.0.0.2/tcp/4001/p2p/" + PEER,))
    assert not machine.settle(run="mine", token=encode_token(later)).has_token_ended
    assert runs.read_run_file(kept) == runs.RunFile("mine", later, live)
    machine.settle(run="mine", token=encode_token(replace(later, expires_at_ms=NOW_MS)))
    assert runs.read_run_file(kept).token == later
    endless = replace(run.token, expires_at_ms=None)
    machine.settle(run="mine", token=encode_token(endless))
    assert runs.read_run_file(kept).token == replace(endless, bootstraps=later.bootstraps)
    machine.settle(run="mine", token=encode_token(later))
    assert runs.read_run_file(kept).token.expires_at_ms is None


# Directories


def test_a_directory_that_was_asked_for_is_that_one_or_an_error(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "node"
    node = machine.settle(data_dir=str(path))
    assert node.data_directory == path
    with pytest.raises(DirectoryLockedError, match="in use by process"):
        machine.settle(data_dir=str(path), role="inferencer")


def test_the_directory_of_the_run_itself_is_refused_instead_of_waited_for(
    machine: Machine, run: Any, tmp_path: Path
) -> None:
    """As an instance of systemd that is called like its run would have it."""
    (tmp_path / "link").symlink_to(machine.home)
    for path in (machine.home / "local", tmp_path / "link" / "local"):
        with pytest.raises(ConfigError, match="local is the run's own directory: give --data-dir one below it"):
            machine.settle(data_dir=str(path))
    with pytest.raises(ConfigError, match="mine is the run's own directory"):
        machine.settle(data_dir=str(machine.home / "mine"), run="mine", token=encode_token(run.token))
    assert not machine.home.exists()
    below = machine.home / "local" / "mine"
    assert machine.settle(data_dir=str(below)).data_directory == below


def test_a_run_whose_descriptors_are_gone_is_not_opened_anew(machine: Machine) -> None:
    """They are to be deleted where they are damaged, and stand in the node's store."""
    first = machine.settle()
    Store.open(first.data_directory, lock=first.lock).close()
    for path in (machine.home / "local" / "descriptors").iterdir():
        path.unlink()
    assert machine.settle().token == first.token, "at a node that knows no descriptors either"
    machine.close()
    assert machine.settle().token == first.token


def test_no_run_is_opened_for_a_directory_that_has_one(machine: Machine, run: Any, tmp_path: Path) -> None:
    """Whoever forgets --run would find a run 'local' in which only the key of that directory may publish."""
    path = tmp_path / "node"
    machine.settle(token=encode_token(run.token), run="theirs", data_dir=str(path)).lock.release()
    Store.open(path).close()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"node holds a node of another run than 'local'.*give --run or --token"):
            machine.settle(data_dir=str(path))
    assert not (machine.home / "local").exists()
    first = machine.settle()
    assert machine.descriptor().authorities == (first.identity.peer_id,)


def test_what_killed_processes_left_half_written_goes(machine: Machine, tmp_path: Path) -> None:
    """Keys among it, in a directory that other nodes and commands write in at the same time."""
    run, node = machine.home / "local", machine.home / "local" / "trainer"
    machine.settle().lock.release()
    old = [run / f".owner.key.{'0a' * 8}.partial", run / "descriptors" / f"000001.record.{'0b' * 8}.partial"]
    young = run / f"run.json.{'0c' * 8}.partial"
    own = node / f".identity.key.{'0d' * 8}.partial"
    for path in (*old, young, own):
        path.touch()
    for path in old:
        os.utime(path, (1_000_000_000.0, 1_000_000_000.0))
    machine.settle()
    assert sorted(machine.home.rglob("*.partial")) == [young]


def test_a_directory_elsewhere_is_found_among_those_of_the_run(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "node"
    placed = machine.settle()
    for _ in range(2):
        node = machine.settle(data_dir=str(path))
        startup.leave_link(node.run_path, node.data_directory)
        node.lock.release()
    mine = machine.settle(data_dir=str(machine.home / "local" / "mine"))
    startup.leave_link(mine.run_path, mine.data_directory)
    beside = [machine.home / "local" / "mine", path, placed.data_directory]
    assert list_nodes(machine.home, "local", "identity.key") == list_nodes(machine.home, None, "identity.key") == beside


def test_a_node_that_could_not_settle_gives_its_directory_back(machine: Machine) -> None:
    node = machine.settle()
    machine.close()
    node.identity.path.write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(Exception, match="damaged"):
            machine.settle()
    assert not (machine.home / "local" / "trainer-2").exists()


def test_so_many_nodes_of_one_role_run_here_and_no_more(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "NODES_PER_ROLE_MAX", 2)
    for _ in range(2):
        machine.settle()
    with pytest.raises(ConfigError, match="2 trainer nodes of this run are running here already"):
        machine.settle()


# Rounds in the private run


def test_the_private_run_takes_rounds_up_when_it_is_asked_for_them(machine: Machine) -> None:
    node = machine.settle()
    assert machine.descriptor().algorithm == "none"
    assert startup.take_up_rounds(node.run_path)
    records = runs.load_descriptors(node.run_path)
    trust = Trust(node.token.run_id, verify)
    for signed in records:
        trust.accept_descriptor(signed)
    descriptor = trust.descriptor
    assert descriptor is not None
    assert (descriptor.revision, descriptor.algorithm) == (1, "pulseloco")
    assert descriptor.open_trainers_max == startup.OPEN_TRAINERS_LOCAL
    assert OuterSettings.from_constants(descriptor.algorithm, descriptor.constants) == OuterSettings()
    assert startup.take_up_rounds(node.run_path), "a second trainer of the machine finds them taken up"
    assert len(runs.load_descriptors(node.run_path)) == 2


def test_only_the_owner_gives_a_run_rounds(machine: Machine) -> None:
    node = machine.settle()
    (node.run_path / "owner.key").rename(node.run_path / "offline.key")
    assert not startup.take_up_rounds(node.run_path)
    assert len(runs.load_descriptors(node.run_path)) == 1
