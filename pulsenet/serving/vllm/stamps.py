"""Says with each answer of vLLM's OpenAI routes which versions wrote it: ``--middleware`` of vLLM's server.

vLLM knows, token by token, but tells it on its own routes alone. Imported by vLLM's server process; plain ASGI.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, Final

from pulsenet.ids import Version
from pulsenet.serving.vllm.exchange import parse_version

MIDDLEWARE: Final = "pulsenet.serving.vllm.stamps.VersionStamps"
FIRST_HEADER: Final = "x-pulsenet-version-first"
LAST_HEADER: Final = "x-pulsenet-version-last"
STREAM_COMMENT: Final = b": x-pulsenet-versions "
"""Begins a comment line of an event stream, which every reader of such streams skips; two versions follow."""
PREFIX: Final = "/v1/"
"""Routes that are stamped begin so."""

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class Versions:
    """The oldest and the newest version that wrote a part of one answer."""

    def __init__(self) -> None:
        self.first: Version | None = None
        self.last: Version | None = None

    def note(self, labels: Iterable[str]) -> None:
        """Take the labels of one completion's weights; those that are no versions count for nothing."""
        for label in labels:
            version = parse_version(label)
            if version is not None:
                self.first = version if self.first is None else min(self.first, version)
                self.last = version if self.last is None else max(self.last, version)


_CURRENT: ContextVar[Versions | None] = ContextVar("pulsenet_versions", default=None)


class VersionStamps:
    """Adds two headers to an answer that is sent whole, and comment lines to one that is streamed.

    Args:
        app: The application around which vLLM puts this.
    """

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        follow_engine(scope["app"].state.engine_client)
        versions = Versions()
        told: tuple[Version | None, Version | None] = (None, None)
        is_stream = False

        async def stamp(message: Message) -> None:
            nonlocal told, is_stream
            found = (versions.first, versions.last)
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                is_stream = any(
                    name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in headers
                )
                if versions.first is not None and not is_stream:
                    headers.append((FIRST_HEADER.encode(), str(versions.first).encode()))
                    headers.append((LAST_HEADER.encode(), str(versions.last).encode()))
                    message = {**message, "headers": headers}
            elif is_stream and found != told and message.get("body"):
                # vLLM sends whole events, so a line before one stands between two.
                told = found
                line = STREAM_COMMENT + f"{versions.first} {versions.last}\n\n".encode()
                message = {**message, "body": line + message["body"]}
            await send(message)

        token = _CURRENT.set(versions)
        try:
            await self._app(scope, receive, stamp)
        finally:
            _CURRENT.reset(token)


def follow_engine(engine: Any) -> None:
    """Let an engine's ``generate`` note the versions of each completion for the request it runs in; once is enough."""
    generate = engine.generate
    if getattr(generate, "is_pulsenet", False):
        return

    def generate_and_note(*arguments: Any, **named: Any) -> Any:
        outputs, versions = generate(*arguments, **named), _CURRENT.get()
        return outputs if versions is None else _note_outputs(outputs, versions)

    generate_and_note.is_pulsenet = True  # type: ignore[attr-defined]
    engine.generate = generate_and_note


async def _note_outputs(outputs: Any, versions: Versions) -> AsyncIterator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            for completion in output.outputs:
                # Stated once, with the completion's end; releases without spans say nothing.
                versions.note(span.version for span in getattr(completion, "weight_versions", None) or ())
            yield output
