"""The process beside a vLLM in the demonstration: asks it for samples, and sends them back as rollouts.

The node beside it starts vLLM and keeps its weights current; this process only asks, as any application would. vLLM
says which version wrote each token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pulsenet.errors import IntegrityError, PulsenetError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local.client import Client
from pulsenet.local.rollouts import Sample, pack_rollouts
from pulsenet.serving.vllm.compare import compare_engine
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.exchange import parse_version, read_answer
from pulsenetd.demo.attaching import wait_for_node
from pulsenetd.demo.models import load_tokenizer
from pulsenetd.demo.reports import Applied, Compared, EngineFound, Finished, Loaded, Sampled, write_report
from pulsenetd.demo.settings import SETTINGS, VLLM_START_SECONDS_MAX, DemoSettings
from pulsenetd.demo.task import Question, draw_questions, score_completion
from pulsenetd.demo.tokenizer import PromptTokenizer

REQUEST_SECONDS_MAX: Final = 120.0
REPLY_SIZE_BYTES_MAX: Final = 16 << 20
POLL_SECONDS: Final = 0.1
RETRY_SECONDS: Final = 0.5
REQUESTS_MAX: Final = 8
"""Questions asked at one time; vLLM batches them."""


@dataclass(frozen=True, slots=True)
class VllmSampler:
    """Samples from a vLLM server by token ids.

    Args:
        url: Such as ``http://127.0.0.1:8000``; the server was started with ``--enable-scale-out``.
        tokenizer: Of the model.
        settings: How to sample.
    """

    url: str
    tokenizer: PromptTokenizer
    settings: DemoSettings

    def name_engine(self) -> str:
        """Return what serves, such as ``vLLM 0.32.0``.

        Raises:
            UnavailableError: It does not answer.
        """
        return f"vLLM {ask(self.url, 'GET', '/version').get('version')}"

    def sample(self, questions: Sequence[Question]) -> list[Sample]:
        """Return a group of completions of every question, each with the versions that wrote its tokens.

        Raises:
            UnavailableError: vLLM does not answer, or does not say which version it was.
        """
        with ThreadPoolExecutor(REQUESTS_MAX) as threads:
            groups = list(threads.map(self._sample_group, questions))
        return [sample for group in groups for sample in group]

    def _sample_group(self, question: Question) -> list[Sample]:
        prompt = self.tokenizer.encode_prompt(question)
        body = {
            "token_ids": prompt,
            "sampling_params": {
                "n": self.settings.group_size,
                "max_tokens": self.settings.completion_tokens_max,
                # As trained: the whole distribution, and the end that this tokenizer knows.
                "temperature": 1.0,
                "logprobs": 1,
                "ignore_eos": True,
                "stop_token_ids": [self.tokenizer.end_token],
            },
            "stream": False,
        }
        try:
            choices = ask(self.url, "POST", "/inference/v1/generate", body)["choices"]
            return [self._read_choice(question, prompt, choice) for choice in choices]
        except (KeyError, TypeError, IndexError) as error:
            raise UnavailableError(f"vLLM at {self.url} answers in another form than expected: {error!r}") from error

    def _read_choice(self, question: Question, prompt: Sequence[int], choice: Mapping[str, Any]) -> Sample:
        versions = [parse_version(str(span["version"])) for span in choice["weight_versions"]]
        first, last = versions[0], versions[-1]
        if first is None or last is None:
            raise UnavailableError("vLLM answered with weights that have no version yet")
        tokens = [int(token) for token in choice["token_ids"]]
        return Sample(
            prompt,
            tokens,
            [float(entry["logprob"]) for entry in choice["logprobs"]["content"]],
            score_completion(question, self.tokenizer.decode(tokens)),
            version_first=first,
            version_last=last,
        )


def ask(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send one request to a server on this machine and return the JSON object of its answer.

    Raises:
        UnavailableError: It does not answer, or not with success.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_SECONDS_MAX)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply = response.read(REPLY_SIZE_BYTES_MAX)
        if response.status != 200:
            raise UnavailableError(f"{url}{path} answers {response.status}: {reply[:300].decode(errors='replace')}")
        value = json.loads(reply)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(f"{url}{path} does not answer: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class Worker:
    """Samples one batch of every version that vLLM holds, and more only if nothing newer comes."""

    client: Client
    control: HttpControl
    sampler: VllmSampler
    draw: random.Random
    prompt_count: int
    _told: Version | None = None
    """Version reported last."""
    _sampled: Version | None = None
    _sampled_at: float = 0.0

    def find_version(self) -> Version | None:
        """Return the version that vLLM holds and the node has confirmed; report a new one.

        Raises:
            PulsenetError: Node or engine do not answer.
        """
        version = parse_version(self.control.label())
        # The node counts how long an update took before it confirms it.
        if version is None or self.client.status().get("engine_version") != version.number:
            return None
        if version != self._told:
            self._told = version
            write_report(sys.stdout, Applied(version.epoch, version.number, 0.0, time.monotonic()))
        return version

    def follow(self, final_file: Path) -> Version:
        """Sample until the version that ``final_file`` names is served; return it."""
        while True:
            try:
                version = self.find_version()
                # the file appears whole, by a rename, when training is over
                final = final_file.read_text() if final_file.exists() else None
                if version is not None and str(version) == final:
                    return version
                if version is None or final is not None or self._is_recent(version):
                    time.sleep(POLL_SECONDS)
                else:
                    self._sample(version)
            except PulsenetError as error:
                print(f"trying again: {error}", file=sys.stderr, flush=True)
                time.sleep(RETRY_SECONDS)

    def _is_recent(self, version: Version) -> bool:
        repeat_seconds = self.sampler.settings.repeat_seconds
        return version == self._sampled and time.monotonic() - self._sampled_at < repeat_seconds

    def _sample(self, version: Version) -> None:
        started_at = time.monotonic()
        settings = self.sampler.settings
        questions = draw_questions(self.draw, count=self.prompt_count, operand_max=settings.operand_max)
        samples = self.sampler.sample(questions)
        taken = self.client.submit_rollouts(pack_rollouts(version, version, samples))
        self._sampled, self._sampled_at = version, time.monotonic()
        if not taken.accepted:
            print(f"rollouts refused by the node: {taken.reason}", file=sys.stderr, flush=True)
            return
        reward = sum(sample.reward for sample in samples) / len(samples)
        write_report(sys.stdout, Sampled(version.number, len(samples), reward, time.monotonic() - started_at))


def wait_for_engine(sampler: VllmSampler) -> str:
    """Wait until vLLM answers, and return its name.

    Raises:
        UnavailableError: It did not within ``VLLM_START_SECONDS_MAX``.
    """
    give_up_at = time.monotonic() + VLLM_START_SECONDS_MAX
    while True:
        try:
            return sampler.name_engine()
        except UnavailableError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(RETRY_SECONDS)


def compare(control: HttpControl, data_directory: Path, checkpoint: Path) -> Compared:
    """Compare all weights in vLLM's memory with the trainer's file."""
    try:
        compare_engine(control, data_directory / "engine", checkpoint)
    except IntegrityError as error:
        return Compared(False, str(error))
    return Compared(True, "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample until the version named in ``--final-file`` is served, compare the weights and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SETTINGS), required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--url", required=True, help="where vLLM listens")
    parser.add_argument("--prompts", type=int, required=True, help="questions in one batch")
    parser.add_argument("--weights", type=Path, required=True, help="directory the trainer writes its last weights to")
    parser.add_argument("--final-file", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parsed = parser.parse_args(arguments)
    started_at = time.monotonic()
    settings = SETTINGS[parsed.model]
    sampler = VllmSampler(parsed.url, load_tokenizer(parsed.model), settings)
    wait_for_node(parsed.data_dir)
    write_report(sys.stdout, EngineFound(wait_for_engine(sampler)))
    write_report(sys.stdout, Loaded(time.monotonic() - started_at))
    control = HttpControl(parsed.url)
    with Client.connect(parsed.data_dir) as client:
        worker = Worker(client, control, sampler, random.Random(parsed.seed), parsed.prompts)
        version = worker.follow(parsed.final_file)
    write_report(sys.stdout, compare(control, parsed.data_dir, parsed.weights))
    answer = read_answer(parsed.data_dir / "engine", 0)
    root = "" if answer is None or answer.root is None else answer.root
    write_report(sys.stdout, Finished(version.epoch, version.number, root))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PulsenetError as error:
        sys.exit(f"inferencer: {error}")
