"""What the doctor says of vLLM, its plugin and GPUs."""

from __future__ import annotations

import json
import sys
import urllib.error
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import UnavailableError
from pulsenetd.doctor.engines import look_at_engine, look_at_gpu, run_program
from pulsenetd.doctor.findings import Grade, Subject

INSIDE = {"vllm": "0.12.0", "pulsenet": "0.1", "torch": "2.9", "plugins": ["pulsenet"]}
URL = "http://127.0.0.1:8000"


def make_subject(**changed: Any) -> Subject:
    return Subject(Path("/nowhere"), **{"engine": "vllm", **changed})


def answer(**changed: object) -> Any:
    return lambda command, seconds: json.dumps({**INSIDE, **changed})


def test_without_an_engine_there_is_nothing_to_check() -> None:
    (finding,) = look_at_engine(Subject(Path("/nowhere")))
    assert (finding.grade, "--engine files" in finding.text) == (Grade.OK, True)


def test_an_engine_with_its_plugin_is_named_with_versions() -> None:
    (finding,) = look_at_engine(make_subject(), run=answer())
    assert (finding.grade, finding.text) == (Grade.OK, "vllm 0.12.0, torch 2.9, plugin of pulsenet 0.1")


@pytest.mark.parametrize(
    ("changed", "words"), [({"vllm": None}, "has no vllm"), ({"plugins": ["other"]}, "does not know pulsenet's plugin")]
)
def test_what_an_interpreter_lacks_is_named(changed: dict[str, object], words: str) -> None:
    (finding,) = look_at_engine(make_subject(), run=answer(**changed))
    assert finding.grade is Grade.FAIL
    assert words in finding.text
    assert "pip install" in finding.next_step


def test_an_interpreter_that_is_not_there_is_named_once() -> None:
    (finding,) = look_at_engine(make_subject(engine_python="/nowhere/python"))
    assert (finding.grade, finding.text) == (Grade.FAIL, "/nowhere/python: No such file or directory")


def test_the_question_is_put_to_a_real_interpreter() -> None:
    """This one may or may not have vLLM; either way it answers."""
    (finding,) = look_at_engine(make_subject(engine_python=sys.executable))
    assert "vllm" in finding.text
    (finding,) = look_at_engine(make_subject(engine_python="/nonexistent/python"))
    assert (finding.grade, "--engine-python" in finding.next_step) == (Grade.FAIL, True)


def test_an_engine_that_answers_is_named_with_its_version() -> None:
    asked = []

    def fetch(url: str) -> dict[str, Any]:
        asked.append(url)
        return {"version": "0.12.0"} if url.endswith("/version") else {}

    findings = look_at_engine(make_subject(engine_url=URL + "/"), run=answer(), fetch=fetch)
    assert findings[-1].text == f"{URL}: vLLM 0.12.0 is healthy"
    assert asked == [f"{URL}/version", f"{URL}/health"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (urllib.error.HTTPError(URL, 503, "no", Message(), None), "answers 503"),
        (urllib.error.URLError(ConnectionRefusedError(111, "refused")), "nobody answers"),
        (TimeoutError("timed out"), "nobody answers"),
    ],
)
def test_an_engine_that_does_not_answer_is_a_failure(error: OSError, words: str) -> None:
    def fetch(url: str) -> dict[str, Any]:
        raise error

    finding = look_at_engine(make_subject(engine_url=URL), run=answer(), fetch=fetch)[-1]
    assert finding.grade is Grade.FAIL
    assert words in finding.text


def give(text: str) -> Any:
    return lambda command, seconds: text


def test_gpus_are_named_one_by_one(tmp_path: Path) -> None:
    text = "NVIDIA H100, 81559, 81000, 550.54\nNVIDIA H100, 81559, 900, 550.54\n"
    findings = look_at_gpu(Subject(tmp_path), run=give(text))
    assert [finding.grade for finding in findings] == [Grade.OK, Grade.WARN]
    assert findings[0].text == "NVIDIA H100, 81000 of 81559 MiB free, driver 550.54"
    assert look_at_gpu(Subject(tmp_path), run=give("\n"))[0].grade is Grade.WARN


def test_no_gpu_is_no_failure_but_a_broken_driver_is(tmp_path: Path) -> None:
    def run(command: Sequence[str], seconds: float) -> str:
        raise FileNotFoundError(command[0])

    assert look_at_gpu(Subject(tmp_path, proc=tmp_path), run=run)[0].grade is Grade.OK
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    assert look_at_gpu(Subject(tmp_path, proc=tmp_path), run=run)[0].grade is Grade.WARN

    def fail(command: Sequence[str], seconds: float) -> str:
        raise UnavailableError("nvidia-smi fails: NVIDIA-SMI has failed")

    (finding,) = look_at_gpu(Subject(tmp_path), run=fail)
    assert (finding.grade, "NVIDIA-SMI has failed" in finding.text) == (Grade.FAIL, True)


def test_a_program_that_fails_says_why_in_its_last_line() -> None:
    with pytest.raises(UnavailableError, match="fails: ValueError: why"):
        run_program([sys.executable, "-c", "raise ValueError('why')"], 30)
    with pytest.raises(UnavailableError, match="within 0 s"):
        run_program([sys.executable, "-c", "import time; time.sleep(30)"], 0.1)
