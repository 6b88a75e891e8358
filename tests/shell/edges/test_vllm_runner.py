"""A vLLM kept current through a real local server, with a stand-in for vLLM around real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pulsenet import limits
from pulsenet.errors import ConfigError, UnavailableError
from pulsenet.ids import Version
from pulsenet.serving.vllm.control import EngineGoneError
from pulsenetd.engines import vllm as runner_module
from pulsenetd.engines import vllm_server
from pulsenetd.engines.vllm import VllmRunner
from pulsenetd.engines.vllm_process import ServerArguments, remember
from pulsenetd.engines.vllm_server import (
    AttachedServer,
    SupervisedServer,
    check_server,
    find_reload_model,
    make_server,
    write_checkpoint,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit" / "serving" / "vllm"))

from fake_vllm import FakeVllm, make_servant

Serve = Callable[[Path], None]


class Linear(torch.nn.Linear):
    """A model with vLLM's loader."""

    def __init__(self) -> None:
        super().__init__(4, 3, dtype=torch.bfloat16)
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def holds(model: torch.nn.Module, weights: Any) -> bool:
    state = model.state_dict()
    return all(
        state[spec.name].reshape(-1).view(torch.int16).numpy().tobytes()
        == weights.table.view(weights.region, index).tobytes()
        for index, spec in enumerate(weights.table.tensors)
    )


class Bench:
    """A stand-in engine, the runner beside it, and what the runner said."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "RETRY_SECONDS_MIN", 0.01)
        monkeypatch.setattr(limits, "RETRY_SECONDS_MAX", 0.02)
        monkeypatch.setattr(runner_module, "UPDATE_WAIT_SECONDS", 0.02)
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.checkpoint.mkdir()
        self.boot_count = 0
        self.ready: list[bool] = []
        self.lost: list[str] = []
        self.times: list[Any] = []
        self.vllm = self.start_vllm()
        self.runner: VllmRunner | None = None

    def start_vllm(self) -> FakeVllm:
        self.boot_count += 1
        self.model = Linear()
        torch.manual_seed(99)
        for parameter in self.model.parameters():
            parameter.data.normal_()
        save_file(self.model.state_dict(), self.checkpoint / "model.safetensors")
        self.vllm = FakeVllm([make_servant(self.model, 0, 1, self.checkpoint, boot=f"boot{self.boot_count}")])
        return self.vllm

    def start(self, server: Any = None, reload_from: Path | None = None) -> None:
        self.runner = VllmRunner(
            self.path,
            server or AttachedServer("http://127.0.0.1:1"),
            on_times=self.times.append,
            on_ready=self.ready.append,
            on_lost=self.lost.append,
            make_control=lambda url: _Route(self),
            reload_from=reload_from,
        )
        self.runner.start()

    def wait(self, until: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 60
        while not until():
            assert time.monotonic() < give_up_at
            time.sleep(0.005)


class _Route:
    """Leads every call to the engine that runs now."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench.vllm, name)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    serve(tmp_path)
    yield bench
    if bench.runner is not None:
        bench.runner.stop()
    for servant in bench.vllm.servants:
        servant.close()


def test_an_engine_is_attached_and_follows(bench: Bench, node: Any, weights: Sequence[Any]) -> None:
    node.staged = [weights[0].stage_full(), weights[2].stage_from(weights[0])]
    bench.start()
    bench.wait(lambda: len(node.confirmations) == 2 and bench.ready[-1:] == [True])
    assert [(item.version, item.ok, item.held) for item in node.confirmations] == [
        (Version(0, 0), True, Version(0, 0)),
        (Version(0, 2), True, Version(0, 2)),
    ]
    assert holds(bench.model, weights[2])
    assert bench.vllm.weight_label == "0.2"
    runner = bench.runner
    assert runner is not None
    bench.wait(lambda: runner.find_upstream().version == Version(0, 2))  # noted once the node has confirmed it
    upstream = runner.find_upstream()
    assert (upstream.url, upstream.version, upstream.read_label()) == ("http://127.0.0.1:1", Version(0, 2), "0.2")
    assert [times.changed_count > 0 for times in bench.times] == [True, True]
    assert bench.lost == []


def test_an_engine_that_is_away_is_waited_for_and_said_once(
    bench: Bench, node: Any, weights: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    node.staged = [weights[0].stage_full()]
    bench.vllm.failing["label"] = UnavailableError("connection refused")
    bench.start()
    bench.wait(lambda: bench.vllm.asked.count("label") > 5)
    assert bench.ready == [False]
    assert bench.runner is not None
    with pytest.raises(UnavailableError, match="connection refused"):
        bench.runner.find_upstream()
    bench.vllm.failing.clear()
    bench.wait(lambda: bench.ready == [False, True])
    assert caplog.text.count("connection refused") == 1


def test_an_engine_that_was_started_again_is_lost_then_loaded_in_full(
    bench: Bench, node: Any, weights: Sequence[Any]
) -> None:
    node.staged = [weights[0].stage_full()]
    bench.start()
    bench.wait(lambda: bench.ready[-1:] == [True])
    old = bench.vllm
    bench.start_vllm()
    bench.wait(lambda: bool(bench.lost))
    node.staged.append(weights[1].stage_full())
    bench.wait(lambda: len(node.confirmations) == 2 and bench.ready[-1])
    assert holds(bench.model, weights[1])
    assert len(bench.lost) == 1
    assert "started again" in bench.lost[0]
    assert bench.ready[-3:] == [True, False, True]
    assert None in node.asked[2:]
    for servant in old.servants:
        servant.close()


def test_a_refused_update_is_confirmed_as_failed_and_tried_again(
    bench: Bench, node: Any, weights: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    bench.vllm.servants[0]._find_obstacle = lambda: "the engine quantises its weights"
    node.staged = [weights[0].stage_full(), weights[0].stage_full()]
    bench.start()
    bench.wait(lambda: len(node.confirmations) == 2)
    assert [item.ok for item in node.confirmations] == [False, False]
    assert node.confirmations[0].reason.startswith("structure: rank 0: the engine quantises its weights")
    assert caplog.text.count("the engine quantises its weights") == 1
    assert bench.ready[0] is False
    assert bench.runner is not None
    with pytest.raises(UnavailableError):
        bench.runner.find_upstream()


def test_an_engine_whose_parameters_moved_is_attached_anew(bench: Bench, node: Any, weights: Sequence[Any]) -> None:
    node.staged = [weights[0].stage_full()]
    bench.start()
    bench.wait(lambda: bench.ready[-1:] == [True])
    bench.model.weight.data = bench.model.weight.data.clone()
    node.staged.append(weights[1].stage_from(weights[0]))
    bench.wait(lambda: len(node.confirmations) == 2)
    assert "moved its parameters" in node.confirmations[1].reason
    assert node.confirmations[1].held is None
    node.staged.append(weights[1].stage_full())
    bench.wait(lambda: len(node.confirmations) == 3 and bench.ready[-1:] == [True])
    assert holds(bench.model, weights[1])


def test_what_the_disk_refuses_now_is_tried_again(bench: Bench, node: Any, weights: Sequence[Any]) -> None:
    in_the_way = bench.path / "engine" / f".partial-paused-{os.getpid()}"
    in_the_way.mkdir(parents=True)
    node.staged = [weights[0].stage_full()]
    bench.start()
    bench.wait(lambda: len(node.confirmations) == 1)
    assert not node.confirmations[0].ok
    in_the_way.rmdir()
    node.staged.append(weights[0].stage_full())
    bench.wait(lambda: bench.ready[-1:] == [True])
    assert holds(bench.model, weights[0])


def test_an_engine_that_cannot_be_patched_loads_versions_if_it_may(
    bench: Bench, node: Any, weights: Sequence[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A restart is tried with patches first: the new engine may be of another kind."""
    caplog.set_level("INFO")
    bench.vllm.servants[0]._find_obstacle = lambda: "the model uses latent attention"
    node.staged = [weights[0].stage_full(), weights[0].stage_full(), weights[2].stage_from(weights[0])]
    bench.start(reload_from=bench.checkpoint)
    bench.wait(lambda: len(node.confirmations) == 3 and bench.ready[-1:] == [True])
    assert [(item.version, item.ok) for item in node.confirmations] == [
        (Version(0, 0), False),
        (Version(0, 0), True),
        (Version(0, 2), True),
    ]
    assert node.confirmations[0].reason.startswith("structure: rank 0: the model uses latent attention")
    assert holds(bench.model, weights[2])
    assert bench.vllm.asked.count("reload") == 2
    assert "loads each version from disk instead: rank 0: the model uses latent attention" in caplog.text
    assert "100 % of vLLM's weights are compared" in caplog.text
    bench.start_vllm()
    bench.wait(lambda: "started again" in "".join(bench.lost))


def test_a_model_directory_is_needed_to_load_versions(tmp_path: Path) -> None:
    assert find_reload_model(False, "/none", ()) is None
    assert find_reload_model(True, str(tmp_path), ("--model", "/none")) == tmp_path
    assert find_reload_model(True, "", ("--model", str(tmp_path))) == tmp_path
    with pytest.raises(ConfigError, match="org/model is none: name it with --companions"):
        find_reload_model(True, "", ("--model", "org/model"))


def test_an_engine_that_refuses_an_update_serves_applications_on_what_it_holds(
    bench: Bench, node: Any, weights: Sequence[Any]
) -> None:
    node.staged = [weights[0].stage_full()]
    bench.start()
    bench.wait(lambda: bench.ready[-1:] == [True])
    bench.vllm.failing["pause"] = UnavailableError("the engine does not pause")
    node.staged.append(weights[2].stage_from(weights[0]))
    bench.wait(lambda: len(node.confirmations) == 2 and bench.ready[-1:] == [False])
    assert bench.runner is not None
    assert bench.runner.find_upstream().version == Version(0, 0)


def test_a_server_that_is_started_for_applications_says_the_versions_of_its_answers(tmp_path: Path) -> None:
    built: list[list[str]] = []

    def start(arguments: Any) -> Any:
        built.append(list(arguments))
        return Process()

    serve = ("--model", "/base", "--middleware", "mine.Own")
    for states_versions in (False, True):
        place = tmp_path / str(states_versions)
        place.mkdir()
        server = make_server(
            "", serve, python="python", data_directory=place, start=start, states_versions=states_versions
        )
        server.url()
    assert "pulsenet.serving.vllm.stamps.VersionStamps" not in built[0]
    assert built[1][2:6] == ["--middleware", "mine.Own", "--middleware", "pulsenet.serving.vllm.stamps.VersionStamps"]


class Process:
    """A server that lives until the test ends it."""

    def __init__(self) -> None:
        self.pid = 2**31 - 1  # no process has it
        self.code: int | None = None
        self.is_stopped = self.is_killed = False

    def exit_code(self) -> int | None:
        return self.code

    def stop(self) -> None:
        self.is_stopped = True

    def kill(self) -> None:
        self.is_killed = True


class Starts:
    """Starts stand-in servers and remembers their arguments."""

    def __init__(self, path: Path) -> None:
        self.now = 1000.0
        self.arguments: list[list[str]] = []
        self.processes: list[Process] = []
        self.checkpoint: Path | None = Path("/checkpoint/0.7")
        self.server = SupervisedServer(
            ServerArguments(["--model", "/base", "--max-model-len=64"]),
            self.start,
            path / "vllm.json",
            path / "vllm.log",
            lambda: self.checkpoint,
            lambda: self.now,
        )

    def start(self, arguments: Any) -> Any:
        self.arguments.append(list(arguments))
        self.processes.append(Process())
        return self.processes[-1]


def test_a_server_that_dies_is_started_again_from_what_the_node_verified(tmp_path: Path) -> None:
    """A worker killed in a commit takes its engine with it."""
    starts = Starts(tmp_path)
    url = starts.server.url()
    assert starts.server.url() == url
    assert starts.arguments[0][:3] == ["--model", "/base", "--max-model-len=64"]
    assert f"http://127.0.0.1:{starts.arguments[0][starts.arguments[0].index('--port') + 1]}" == url
    starts.server.note_healthy()
    starts.processes[0].code = -9
    with pytest.raises(UnavailableError, match="started again in"):
        starts.server.url()
    assert starts.processes[0].is_stopped
    starts.now += limits.RETRY_SECONDS_MIN
    starts.server.url()
    second = starts.arguments[1]
    assert second[second.index("--model") + 1] == "/checkpoint/0.7"
    assert second[second.index("--served-model-name") + 1] == "/base"
    assert second.count("--model") == 1
    starts.server.stop()
    assert starts.processes[1].is_stopped


def test_a_server_that_dies_is_reported_with_its_last_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    starts = Starts(tmp_path)
    starts.server.url()
    (tmp_path / "vllm.log").write_text(
        "(EngineCore_0 pid=7) ERROR 11-30 16:00:00 [core.py:700] ValueError: no \x1b[31mtokenizer\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    starts.processes[0].code = 1
    with caplog.at_level("WARNING"), pytest.raises(UnavailableError):
        starts.server.url()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "vLLM ended with exit code 1 (ValueError: no ?[31mtokenizer): started again in "
        f"{limits.RETRY_SECONDS_MIN:.0f} s; see {tmp_path / 'vllm.log'}"
    )


def test_a_server_that_keeps_dying_is_started_at_growing_intervals_until_it_lives(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    starts.checkpoint = None
    pauses = []
    for _ in range(4):
        starts.server.url()
        starts.processes[-1].code = 1
        with pytest.raises(UnavailableError):
            starts.server.url()
        pauses.append(starts.server._retry_at - starts.now)
        starts.now = starts.server._retry_at
    assert pauses == [limits.RETRY_SECONDS_MIN * 2**index for index in range(4)]
    assert starts.arguments[-1][:2] == ["--model", "/base"]
    starts.server.url()
    starts.now += vllm_server.HEALTHY_SECONDS + 1
    starts.server.note_healthy()
    starts.processes[-1].code = 1
    with pytest.raises(UnavailableError):
        starts.server.url()
    assert starts.server._retry_at - starts.now == limits.RETRY_SECONDS_MIN


def test_a_server_that_never_answers_is_ended_and_started_again(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    starts.server.url()
    starts.now += vllm_server.START_SECONDS_MAX + 1
    with pytest.raises(UnavailableError):
        starts.server.url()
    assert starts.processes[0].is_stopped


def test_a_server_that_answered_and_falls_silent_is_ended_and_started_again(tmp_path: Path) -> None:
    """One whose engine died while it was asked something waits for the answer, and does not end by itself."""
    starts = Starts(tmp_path)
    starts.server.url()
    starts.server.note_silent()
    starts.now += vllm_server.SILENCE_SECONDS_MAX + 1
    starts.server.url()
    assert not starts.processes[0].is_stopped, "it is still starting"
    starts.server.note_healthy()
    starts.server.note_silent()
    starts.now += vllm_server.SILENCE_SECONDS_MAX
    starts.server.note_silent()
    starts.server.url()
    # one answer in between is enough
    starts.server.note_healthy()
    starts.now += vllm_server.SILENCE_SECONDS_MAX + 1
    starts.server.url()
    assert not starts.processes[0].is_stopped
    starts.server.note_silent()
    starts.now += vllm_server.SILENCE_SECONDS_MAX + 1
    with pytest.raises(UnavailableError, match="started again in"):
        starts.server.url()
    assert starts.processes[0].is_stopped
    starts.now += limits.RETRY_SECONDS_MIN
    starts.server.url()
    assert starts.arguments[1][starts.arguments[1].index("--model") + 1] == "/checkpoint/0.7"


def test_a_server_whose_engine_died_gets_a_moment_to_end_by_itself(tmp_path: Path) -> None:
    """It waits for ever for what it had asked the engine, which is not worth a minute of silence."""
    starts = Starts(tmp_path)
    starts.server.url()
    starts.server.note_gone()
    starts.now += vllm_server.GONE_SECONDS_MAX + 1
    starts.server.url()
    assert not starts.processes[0].is_stopped, "it is still starting: nobody listens yet"
    starts.server.note_healthy()
    starts.server.note_gone()
    starts.now += vllm_server.GONE_SECONDS_MAX
    starts.server.url()
    starts.server.note_healthy()
    starts.server.note_gone()
    starts.now += vllm_server.GONE_SECONDS_MAX
    starts.server.note_gone()
    starts.server.url()
    assert not starts.processes[0].is_stopped
    starts.now += 1
    with pytest.raises(UnavailableError, match="started again in"):
        starts.server.url()
    assert starts.processes[0].is_killed, "asked to end, it would wait as long"
    assert starts.processes[0].is_stopped


def test_the_runner_tells_a_server_whenever_its_engine_does_not_answer(
    bench: Bench, node: Any, weights: Sequence[Any]
) -> None:
    told: list[bool | None] = []

    class Listening(AttachedServer):
        def note_healthy(self) -> None:
            told.append(True)

        def note_silent(self) -> None:
            told.append(False)

        def note_gone(self) -> None:
            told.append(None)

    node.staged = [weights[0].stage_full()]
    bench.vllm.failing["label"] = UnavailableError("timed out")
    bench.start(Listening("http://127.0.0.1:1"))
    bench.wait(lambda: len(told) > 2)
    assert set(told) == {False}
    bench.vllm.failing["label"] = EngineGoneError("refused")
    bench.wait(lambda: told[-1] is None)
    bench.vllm.failing.clear()
    bench.wait(lambda: told[-1] is True)
    bench.vllm.is_asleep = True
    bench.wait(lambda: bench.ready[-1:] == [False])
    told.clear()
    bench.wait(lambda: len(told) > 2)
    assert set(told) == {True}, "one that sleeps is not to be ended as silent"
    assert bench.runner is not None
    with pytest.raises(UnavailableError, match="sleeps or is paused"):
        bench.runner.find_upstream()
    node.staged.append(weights[0].stage_full())
    bench.vllm.is_asleep = False
    bench.wait(lambda: bench.ready[-1:] == [True])


def test_a_server_left_by_a_node_that_was_killed_is_found_again(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        remember(tmp_path / "vllm.json", child.pid, 8123, ServerArguments(["--model", "/base", "--max-model-len=64"]))
        starts = Starts(tmp_path)
        assert starts.server.url() == "http://127.0.0.1:8123"
        assert starts.processes == []
        starts.server.note_healthy()
    finally:
        child.kill()
        child.wait()
    with pytest.raises(UnavailableError):
        starts.server.url()
    starts.now += limits.RETRY_SECONDS_MIN
    starts.server.url()
    assert starts.arguments[0][starts.arguments[0].index("--model") + 1] == "/checkpoint/0.7"


def test_the_runner_takes_up_a_server_at_its_new_place(
    bench: Bench, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    starts = Starts(tmp_path)
    starts.server._monotonic = time.monotonic
    node.staged = [weights[0].stage_full()]
    bench.start(starts.server)
    bench.wait(lambda: bench.ready[-1:] == [True])
    bench.start_vllm()
    starts.processes[0].code = -9
    bench.wait(lambda: bool(bench.lost))
    node.staged.append(weights[1].stage_full())
    bench.wait(lambda: len(node.confirmations) == 2)
    assert holds(bench.model, weights[1])
    assert bench.runner is not None
    bench.runner.stop()
    assert starts.processes[-1].is_stopped
    bench.runner = None


def test_a_checkpoint_is_written_from_what_the_node_holds(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "engine").mkdir(mode=0o700)
    assert write_checkpoint(tmp_path, "org/model") is None
    assert write_checkpoint(tmp_path, str(model)) is None
    node.staged = [weights[1].stage_full()]
    directory = write_checkpoint(tmp_path, str(model))
    assert directory is not None
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors", "pulsenet.json"]
    assert directory.name == "0.1"
    assert [(told.ok, told.held, told.reason) for told in node.confirmations] == [(False, None, "copied")]
    (tmp_path / "engine" / "checkpoint").rename(tmp_path / "moved")
    (tmp_path / "engine" / "checkpoint").write_text("in the way")
    node.staged = [weights[2].stage_full()]
    assert write_checkpoint(tmp_path, str(model)) is None
    assert "no checkpoint of version 0.2 can be written" in caplog.text
    assert [told.reason for told in node.confirmations] == ["copied"] * 2, "no engine was lost"


def test_options_that_describe_no_engine_are_refused(tmp_path: Path) -> None:
    check_server("http://127.0.0.1:8000", ())
    check_server("", ("--model", "/base"))
    with pytest.raises(ConfigError, match="not on this machine"):
        check_server("http://10.1.1.1:8000", ())
    with pytest.raises(ConfigError, match="--model at least"):
        check_server("", ("--dtype", "bfloat16"))
    attached = make_server("http://127.0.0.1:8000", (), python="python", data_directory=tmp_path)
    assert attached.url() == "http://127.0.0.1:8000"
    attached.note_healthy()
    attached.stop()
    started: list[Any] = []
    made = make_server(
        "",
        ("--model", "/base", "--port", "8123"),
        python="python",
        data_directory=tmp_path,
        start=lambda arguments: started.append(arguments) or Process(),  # type: ignore[func-returns-value, arg-type, return-value]
    )
    assert made.url() == "http://127.0.0.1:8123"
    assert started[0][:4] == ["--model", "/base", "--port", "8123"]


def test_no_thread_is_left(bench: Bench) -> None:
    bench.start()
    assert bench.runner is not None
    bench.runner.stop()
    bench.runner = None
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-engine"]
