"""The process beside a vLLM: what it asks, what it makes of the answers, and when it stops."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import IntegrityError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local.protocol import RolloutsTaken, SubmitRollouts
from pulsenetd.demo import vllm_inferencer
from pulsenetd.demo.reports import Applied, Compared, Sampled, read_report
from pulsenetd.demo.settings import SETTINGS
from pulsenetd.demo.task import Question
from pulsenetd.demo.tokenizer import CharacterTokenizer
from pulsenetd.demo.vllm_inferencer import VllmSampler, Worker, compare, wait_for_engine

TOKENIZER = CharacterTokenizer()
SETTING = SETTINGS["tiny"]


class StandIn:
    """A server that answers as vLLM does."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.versions: list[Any] = [{"version": "0.3", "start": 0, "end": 1}, {"version": "0.4", "start": 1, "end": 2}]
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"version": "0.32.0"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.asked.append({"path": self.path, **body})
                self.answer(stand_in.generate(body))

            def answer(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(stand_in.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def generate(self, body: dict[str, Any]) -> Any:
        tokens = [*TOKENIZER.encode("5"), TOKENIZER.end_token]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "weight_versions": self.versions,
        }
        return self.change({"choices": [choice] * body["sampling_params"]["n"]})

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def vllm() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def test_a_group_of_samples_bears_the_versions_that_wrote_it(vllm: StandIn) -> None:
    sampler = VllmSampler(vllm.url, TOKENIZER, SETTING)
    assert wait_for_engine(sampler) == "vLLM 0.32.0"
    samples = sampler.sample([Question(2, 3), Question(4, 4)])
    assert len(samples) == 2 * SETTING.group_size
    first = samples[0]
    assert (first.version_first, first.version_last) == (Version(0, 3), Version(0, 4))
    assert list(first.logprobs) == [-0.5, -0.25]
    assert [samples[0].reward, samples[-1].reward] == [1.0, pytest.approx(0.1)]
    (asked, _) = sorted(vllm.asked, key=lambda body: body["token_ids"])
    assert asked["path"] == "/inference/v1/generate"
    assert asked["token_ids"] == TOKENIZER.encode_prompt(Question(2, 3))
    parameters = asked["sampling_params"]
    assert (parameters["temperature"], parameters["stop_token_ids"]) == (1.0, [TOKENIZER.end_token])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda answer: {}, "another form"),
        (lambda answer: {"choices": [{}]}, "another form"),
        (lambda answer: {"choices": [{**answer["choices"][0], "weight_versions": None}]}, "another form"),
        (
            lambda answer: {"choices": [{**answer["choices"][0], "weight_versions": [{"version": "default"}]}]},
            "no version yet",
        ),
        (lambda answer: 7, "another form"),
    ],
)
def test_answers_without_a_version_are_no_samples(change: Any, reason: str, vllm: StandIn) -> None:
    vllm.change = change
    with pytest.raises(UnavailableError, match=reason):
        VllmSampler(vllm.url, TOKENIZER, SETTING).sample([Question(2, 3)])


def test_an_engine_that_refuses_or_is_away_is_unavailable(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.status = 503
    sampler = VllmSampler(vllm.url, TOKENIZER, SETTING)
    with pytest.raises(UnavailableError, match="answers 503"):
        sampler.sample([Question(2, 3)])
    monkeypatch.setattr(vllm_inferencer, "VLLM_START_SECONDS_MAX", -1.0)
    with pytest.raises(UnavailableError, match="answers 503"):
        wait_for_engine(sampler)
    with pytest.raises(UnavailableError, match="does not answer"):
        VllmSampler("http://127.0.0.1:1", TOKENIZER, SETTING).name_engine()


class Node:
    """The node and the engine's label, as a script of what they say."""

    def __init__(self, labels: list[str], engine_versions: list[int | None]) -> None:
        self.labels, self.engine_versions = iter(labels), iter(engine_versions)
        self.submitted: list[SubmitRollouts] = []
        self.accepts = True

    def label(self) -> str:
        return next(self.labels)

    def status(self) -> dict[str, Any]:
        return {"engine_version": next(self.engine_versions)}

    def submit_rollouts(self, batch: SubmitRollouts) -> RolloutsTaken:
        self.submitted.append(batch)
        return RolloutsTaken(self.accepts, "" if self.accepts else "rate")


def make_worker(vllm: StandIn, node: Any) -> Worker:
    return Worker(node, node, VllmSampler(vllm.url, TOKENIZER, SETTING), random.Random(1), 2)


def test_each_version_is_sampled_once_after_the_node_confirmed_it(
    vllm: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_inferencer, "POLL_SECONDS", 0.0)
    final_file = tmp_path / "final"
    node = Node(["default", "0.3", "0.3", "0.3", "0.4", "0.5"], [None, 3, 3, 4, 5])
    status = node.status

    def status_and_end() -> dict[str, Any]:
        found = status()
        if found["engine_version"] == 4:
            final_file.write_text("0.5")
        return found

    node.status = status_and_end  # type: ignore[method-assign]
    assert make_worker(vllm, node).follow(final_file) == Version(0, 5)
    # the answers say which weights wrote them, whatever the engine's label was when they were asked for
    assert [(batch.version_first, batch.version_last) for batch in node.submitted] == [(Version(0, 3), Version(0, 4))]
    reports = [read_report(line) for line in capsys.readouterr().out.splitlines()]
    assert [type(report) for report in reports] == [Applied, Sampled, Applied, Applied]
    assert isinstance(reports[1], Sampled)
    assert reports[1].sample_count == 2 * SETTING.group_size


def test_refusals_and_faults_are_said_and_survived(
    vllm: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_inferencer, "RETRY_SECONDS", 0.0)
    final_file = tmp_path / "final"
    node = Node(["0.3", "0.3", "0.4"], [3, 3, 4])
    node.accepts = False
    submit = node.submit_rollouts

    def submit_second_time(batch: SubmitRollouts) -> RolloutsTaken:
        if not node.submitted:
            node.submitted.append(batch)
            raise UnavailableError("the daemon went away")
        final_file.write_text("0.4")
        return submit(batch)

    node.submit_rollouts = submit_second_time  # type: ignore[method-assign]
    assert make_worker(vllm, node).follow(final_file) == Version(0, 4)
    captured = capsys.readouterr()
    assert "trying again: the daemon went away" in captured.err
    assert "refused by the node: rate" in captured.err
    assert "sampled" not in captured.out


def test_a_difference_is_reported_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(vllm_inferencer, "compare_engine", lambda *given: asked.append(given[1:]))
    control: Any = None
    assert compare(control, tmp_path, tmp_path / "weights") == Compared(True, "")
    assert asked == [(tmp_path / "engine", tmp_path / "weights")]

    def differ(*_: Any) -> None:
        raise IntegrityError("rank 0: other bits")

    monkeypatch.setattr(vllm_inferencer, "compare_engine", differ)
    assert compare(control, tmp_path, tmp_path) == Compared(False, "rank 0: other bits")
