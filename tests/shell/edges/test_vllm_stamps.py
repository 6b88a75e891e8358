"""vLLM says which versions wrote an answer: the middleware around an application that asks its engine as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pulsenet.serving.vllm.stamps import MIDDLEWARE, VersionStamps, follow_engine

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def output(*labels: str, spans: bool = True) -> Any:
    """Return what an engine yields: a completion whose tokens are of these weights."""
    completion = SimpleNamespace(weight_versions=[SimpleNamespace(version=label) for label in labels])
    return SimpleNamespace(outputs=[completion if spans else SimpleNamespace()])


class Engine:
    """An engine that yields what it was given, whoever asks."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs
        self.closed_count = 0

    async def generate(self, prompt: str) -> AsyncIterator[Any]:
        try:
            for item in self.outputs:
                await asyncio.sleep(0)
                yield item
        finally:
            self.closed_count += 1


class Application:
    """Answers after its engine, in tasks of its own, as vLLM's handlers do."""

    def __init__(self, engine: Engine, headers: list[tuple[bytes, bytes]], *, prompts: int = 1) -> None:
        self.state = SimpleNamespace(engine_client=engine)
        self.headers = headers
        self.prompts = prompts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        engine = self.state.engine_client
        is_stream = self.headers is EVENTS
        if is_stream:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})

        async def ask() -> None:
            async for item in engine.generate("prompt"):
                if is_stream:
                    await send({"type": "http.response.body", "body": b"data: %d\n\n" % len(item.outputs)})

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.prompts):
                tasks.create_task(ask())
        if not is_stream:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": b""})


async def serve(app: Application, path: str = "/v1/completions", kind: str = "http") -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read here")

    scope = {"type": kind, "path": path, "app": app}
    await VersionStamps(app)(scope, receive, send)
    return sent


async def test_an_answer_has_the_oldest_and_the_newest_version_of_all_its_completions() -> None:
    engine = Engine(output(), output("0.9", "0.10"), output("0.8"), output("default"))
    start, _ = await serve(Application(engine, JSON, prompts=2))
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"x-pulsenet-version-first": b"0.8",
        b"x-pulsenet-version-last": b"0.10",
    }
    assert engine.closed_count == 2


async def test_a_stream_has_them_in_a_comment_before_the_event_that_ends_a_choice() -> None:
    sent = await serve(Application(Engine(output(), output("0.3", "0.4"), output(), output("0.5")), EVENTS))
    assert dict(sent[0]["headers"]) == {EVENTS[0][0]: EVENTS[0][1]}
    assert [message["body"] for message in sent[1:]] == [
        b"data: 1\n\n",
        b": x-pulsenet-versions 0.3 0.4\n\ndata: 1\n\n",
        b"data: 1\n\n",
        b": x-pulsenet-versions 0.3 0.5\n\ndata: 1\n\n",
        b"",
    ]


@pytest.mark.parametrize("outputs", [[], [output(spans=False)], [output("default")]])
async def test_an_engine_that_says_nothing_leaves_answers_as_they_are(outputs: list[Any]) -> None:
    start, _ = await serve(Application(Engine(*outputs), JSON))
    assert start["headers"] == JSON
    assert [message.get("body") for message in await serve(Application(Engine(*outputs), EVENTS))][-1] == b""


@pytest.mark.parametrize(("path", "kind"), [("/inference/v1/generate", "http"), ("/v1/realtime", "websocket")])
async def test_other_routes_are_left_alone(path: str, kind: str) -> None:
    engine = Engine(output("0.3"))
    start, _ = await serve(Application(engine, JSON), path, kind)
    assert start["headers"] == JSON
    assert "generate" not in vars(engine)


async def test_requests_of_one_engine_do_not_mix_and_it_is_followed_once() -> None:
    engine = Engine(output("0.3"))
    await serve(Application(engine, JSON))
    followed = engine.generate
    engine.outputs = (output("0.4"),)
    start, _ = await serve(Application(engine, JSON))
    assert engine.generate is followed
    assert dict(start["headers"])[b"x-pulsenet-version-first"] == b"0.4"
    assert [item async for item in engine.generate("prompt")] == [engine.outputs[0]]


async def test_a_request_that_is_given_up_ends_at_the_engine_at_once() -> None:
    engine = Engine(output("0.3"), output("0.4"))

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        app = engine.generate("prompt")
        await anext(app)
        await app.aclose()

    inner.state = SimpleNamespace(engine_client=engine)  # type: ignore[attr-defined]
    stamps = VersionStamps(inner)
    await stamps({"type": "http", "path": "/v1/completions", "app": inner}, None, None)  # type: ignore[arg-type]
    assert engine.closed_count == 1


def test_vllm_finds_the_middleware_by_its_name() -> None:
    module, _, name = MIDDLEWARE.rpartition(".")
    assert (module, name) == (VersionStamps.__module__, VersionStamps.__name__)
    engine = Engine()
    follow_engine(engine)
    follow_engine(engine)
