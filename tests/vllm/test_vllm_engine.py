"""Patches land in a live vLLM between two scheduler steps, all or nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import PatchMismatchError, PulsenetError, UnavailableError
from pulsenet.ids import Version
from pulsenet.serving.engine import RecordsUpdate, apply_update


def test_an_engine_started_from_the_version_is_taken_up_without_a_pause(served: Any) -> None:
    assert served.engine.version == Version(0, 0)
    assert served.times[0].pause_seconds == 0.0
    assert served.server.ask("GET", "/weight_info") == {"weight_version": "0.0"}


def test_twenty_patches_under_load_equal_a_fresh_engine(served: Any) -> None:
    """A-APP-2: tokens, logprobs and every parameter; no request aborted; addresses stay."""
    from vllm_swarm import Load, get_checksums

    addresses = served.addresses()
    first = served.answers()
    with Load(served.server) as load:
        for _ in range(20):
            served.bring_forward()
        while len(load.finished) < 8 and not load.errors:
            time.sleep(0.1)
    assert load.errors == []
    assert {request.finish_reason for request in load.finished} == {"length"}
    assert served.addresses() == addresses
    found, checksums = served.answers(), served.checksums()
    assert [answer.token_ids for answer in found] != [answer.token_ids for answer in first]
    with served.fresh_engine("fresh") as fresh:
        assert get_checksums(fresh) == checksums
        expected = [fresh.generate(prompt, 16) for prompt in _prompts()]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert [answer.logprobs for answer in found] == [answer.logprobs for answer in expected]
    pauses = sorted(times.pause_seconds for times in served.times if times.pause_seconds)
    print(f"\n{served.family} x{served.ranks}: pause median {1000 * pauses[len(pauses) // 2]:.0f} ms of {len(pauses)}")


def _prompts() -> list[list[int]]:
    from vllm_swarm import PROMPTS

    return PROMPTS


def test_the_prefix_cache_is_never_stale(served: Any) -> None:
    """A-CACHE-1."""
    prompt = [(7 * position) % 256 for position in range(300)]
    served.server.generate(prompt, 8)
    assert served.server.generate(prompt, 8).cached_count > 0
    served.bring_forward(density=0.2)
    found = served.server.generate(prompt, 8)
    assert found.cached_count == 0
    served.server.ask("POST", "/reset_prefix_cache")
    cold = served.server.generate(prompt, 8)
    assert (found.token_ids, found.logprobs) == (cold.token_ids, cold.logprobs)
    assert found.spans == ((str(served.held.version), 0, 8),)


def test_without_the_reset_the_cache_would_be_stale(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-CACHE-1: what the test before guards against does happen in this engine."""
    prompt = [(11 * position) % 256 for position in range(300)]
    served.server.generate(prompt, 8)
    control = served.engine._control
    monkeypatch.setattr(control, "pause", lambda: control._call("POST", "/pause?mode=keep&clear_cache=false"))
    served.bring_forward(density=0.2)
    monkeypatch.undo()
    assert served.server.generate(prompt, 8).cached_count > 0
    served.server.ask("POST", "/reset_prefix_cache")


def test_a_request_that_straddles_an_update_is_stamped_with_both_versions(served: Any) -> None:
    """A-CACHE-3."""
    finished: list[Any] = []
    count = 600
    thread = threading.Thread(target=lambda: finished.append(served.server.generate(range(10), count)))
    thread.start()
    time.sleep(0.3)
    before = str(served.held.version)
    served.bring_forward()
    thread.join()
    (answer,) = finished
    assert answer.finish_reason == "length"
    assert [label for label, _, _ in answer.spans] == [before, str(served.held.version)]
    (_, start, middle), (_, also_middle, end) = answer.spans
    assert (start, end) == (0, count)
    assert middle == also_middle


def test_a_request_that_comes_during_the_update_sees_the_new_version_only(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-CACHE-2."""
    finished: list[Any] = []
    threads = []
    control = served.engine._control
    pause = control.pause

    def pause_and_ask() -> None:
        pause()
        thread = threading.Thread(target=lambda: finished.append(served.server.generate(range(30), 8)))
        thread.start()
        threads.append(thread)
        time.sleep(0.2)
        assert finished == []

    monkeypatch.setattr(control, "pause", pause_and_ask)
    served.bring_forward()
    threads[0].join()
    assert finished[0].spans == ((str(served.held.version), 0, 8),)


def test_applications_that_ask_through_the_node_are_told_which_versions_answered(served: Any) -> None:
    """A-CACHE-3, on the OpenAI routes: whole and streamed, also where an update falls into the answer."""
    from vllm_openai import ask, open_port, read_stream

    def version() -> str:
        return str(served.held.version)

    with open_port(served) as url:
        assert [model["object"] for model in ask(url, "/models")["data"]] == ["model"]
        expected = {"version_first": version(), "version_last": version(), "exact": True}
        assert ask(url, "/completions", count=8)["pulsenet"] == expected

        def straddle(answer_while_updated: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            """Return an answer into which an update fell; one that was quicker must say that none did."""
            for _ in range(6):
                before = version()
                answer = answer_while_updated()
                if answer["pulsenet"] == {"version_first": before, "version_last": version(), "exact": True}:
                    return answer
                told = answer["pulsenet"]
                assert told["version_first"] == told["version_last"] in (before, version())
                assert told["exact"]
            raise AssertionError("no update fell into an answer")

        def whole() -> dict[str, Any]:
            finished: list[dict[str, Any]] = []
            thread = threading.Thread(target=lambda: finished.append(ask(url, "/completions", count=600)))
            thread.start()
            time.sleep(0.3)
            served.bring_forward()
            thread.join()
            return finished[0]

        def streamed() -> dict[str, Any]:
            events = read_stream(url, count=600)
            first = next(events)
            served.bring_forward()
            *middle, last = events
            assert "pulsenet" not in first
            assert len(middle) > 100
            return last

        assert straddle(whole)["usage"]["completion_tokens"] == 600
        assert straddle(streamed)["choices"][0]["finish_reason"] == "length"
        # A client that hangs up leaves nothing behind that an update would have to wait for.
        gone = read_stream(url, count=900)
        next(gone)
        gone.close()
        served.bring_forward()
        assert ask(url, "/completions", count=8)["pulsenet"]["version_first"] == version()


def test_refused_records_leave_the_engine_as_it_was(served: Any) -> None:
    """A-APP-5 and wrong base, on the real engine; the next version goes through."""
    from vllm_versions import Published

    before = served.answers()
    following = served.make_next()
    good = following.records_from(served.held)
    twice = RecordsUpdate(
        good.base_version, good.version, good.root, good.table, lambda: iter([*good.changes(), *good.changes()])
    )
    wrong = Published.take(served.model, Version(0, 900))
    with pytest.raises(PulsenetError):
        apply_update(served.engine, twice)
    with pytest.raises(PatchMismatchError, match=r"lead from 0\.900"):
        apply_update(served.engine, following.records_from(wrong))
    assert served.engine.version == served.held.version
    assert served.answers() == before
    assert not served.server.is_paused()
    apply_update(served.engine, good)
    served.held = following


def test_a_version_without_visible_change_moves_the_label_alone(served: Any) -> None:
    """A-ENC-6."""
    from vllm_versions import Published

    number = served.held.version.number + 1
    following = Published.take(served.model, Version(0, number))
    apply_update(served.engine, following.records_from(served.held))
    served.held = following
    assert served.times[-1].pause_seconds == 0.0
    assert served.server.ask("GET", "/weight_info") == {"weight_version": str(following.version)}


def test_a_rank_that_fails_in_the_commit_sends_all_back(served: Any) -> None:
    """A-APP-1, A-APP-3; then records from the engine's version to the newest."""
    before, checksums = served.answers(), served.checksums()
    served.break_rank("pulsenet_fail_commit", served.ranks - 1)
    skipped = served.make_next()
    with pytest.raises(UnavailableError, match="failed on request"):
        apply_update(served.engine, skipped.records_from(served.held))
    assert served.engine.version == served.held.version
    assert served.checksums() == checksums
    assert served.answers() == before
    following = _publish_after(served, skipped)
    apply_update(served.engine, following.records_from(served.held))
    served.held = following
    served.engine.read_back()


def _publish_after(served: Any, skipped: Any) -> Any:
    """Publish the version after one that the engine does not have."""
    from vllm_models import change_weights
    from vllm_versions import Published

    number = skipped.version.number + 1
    change_weights(served.model, number)
    return Published.take(served.model, Version(0, number))


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
def test_a_node_that_is_killed_while_the_engine_is_paused_holds_nobody_up(path: str, served: Any) -> None:
    """A-APP-1: the watchdog puts back what was written and resumes; a new node takes it up at the old version."""
    from vllm_swarm import SEED
    from vllm_versions import Published

    from pulsenet.serving.vllm.control import HttpControl
    from pulsenet.serving.vllm.engine import VllmEngine

    # A full update first, so that the doomed node can make the version that is held by itself.
    model = _make_model(served.family)
    held = Published.take(model, Version(1, 0))
    with held.as_full() as update:
        apply_update(served.engine, update)
    before, checksums = served.answers(), served.checksums()
    served.engine.close()
    script = Path(__file__).with_name("doomed_node.py")
    arguments = [served.server.url, str(served.engine.directory), served.family, str(SEED), "0", path]
    ended = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    give_up_at = time.monotonic() + 30
    while served.server.is_paused() and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert not served.server.is_paused()
    assert served.checksums() == checksums
    assert served.answers() == before
    served.engine = VllmEngine(HttpControl(served.server.url), served.engine.directory, on_times=served.times.append)
    served.engine.probe()
    assert served.engine.version == held.version
    served.model, served.held = model, held


def _make_model(family: str) -> Any:
    from vllm_models import make_model
    from vllm_swarm import SEED

    return make_model(family, SEED)


def test_a_worker_killed_in_the_commit_is_not_trusted_and_its_successor_starts_from_the_version(served: Any) -> None:
    """A-APP-1. Last: the engine of this module ends here."""
    from vllm_models import save_checkpoint
    from vllm_server import running_server
    from vllm_swarm import rank_arguments, rank_environment

    from pulsenet.serving.vllm.control import EngineGoneError, HttpControl
    from pulsenet.serving.vllm.engine import VllmEngine

    served.break_rank("pulsenet_die_in_commit", served.ranks - 1)
    following = served.make_next()
    with pytest.raises(UnavailableError):
        apply_update(served.engine, following.records_from(served.held))
    assert served.engine.version is None
    # Said at once: the server never answers what it had asked the engine, and ends for nobody while it waits.
    with pytest.raises(EngineGoneError):
        served.engine.probe()
    served.engine.close()
    served.server.stop(patience_seconds=1.0)
    checkpoint = save_checkpoint(served.model, served.path / "written")
    times: list[Any] = []
    arguments, environment = rank_arguments(served.ranks), rank_environment(served.ranks)
    with running_server(checkpoint, served.path / "successor.log", *arguments, **environment) as server:
        engine = VllmEngine(HttpControl(server.url), served.engine.directory, on_times=times.append)
        engine.probe()
        assert engine.version is None
        with following.as_full() as update:
            apply_update(engine, update)
        assert engine.version == following.version
        assert times[-1].pause_seconds == 0.0
        engine.close()
    served.engine = VllmEngine(HttpControl(server.url), served.engine.directory)
