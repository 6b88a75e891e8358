"""One p2pd process: started, asked, watched and taken down, with nothing left behind.

hivemind's ``P2P`` starts the process and serves its DHT. Requests to p2pd's control socket are made here
instead: hivemind's own leave sockets open when a call fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pulsenet import limits
from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UnavailableError, UsageError
from pulsenet.ids import PeerId
from pulsenetd.errors import AddressInUseError, P2pdError
from pulsenetd.identity import from_libp2p_bytes, to_libp2p_bytes
from pulsenetd.network import addresses, hivemind_repairs, p2pd_binary

logger: Final = logging.getLogger("pulsenet.p2pd")

StreamHandler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one incoming stream; the first argument is the remote libp2p peer id, binary."""

RawStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_SOCKET_PATH_SIZE_MAX: Final = 107
"""Longest unix socket path of Linux, without the final zero byte."""
_SOCKET_NAME_SIZE_MAX: Final = len("/p2pclient-0123456789a.sock")
_SOCKET_PATTERNS: Final = ("p2pd-*.sock", "p2pclient-*.sock")

_PORT_WAIT_SECONDS: Final = 3.0
"""A p2pd whose node was killed with -9 holds its port for about 2 s."""
_EXIT_WAIT_SECONDS: Final = 2.0
_PROGRESS_SECONDS: Final = 5.0

_SIMULTANEOUS_CALLS_MAX: Final = 64
"""p2pd's control socket takes 100 waiting connections and refuses the rest (measured)."""

_REPLY_SIZE_BYTES_MAX: Final = 4 << 20
"""Largest answer taken from p2pd's control socket."""

STREAM_BUFFER_SIZE_BYTES: Final = 2 * limits.CHUNK_SIZE_BYTES_MAX
"""What asyncio buffers of one stream before it stops reading: the fastest setting measured."""

_INCOMING_BACKLOG: Final = 256
_STREAM_INFO_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class P2pdSettings:
    """How to start p2pd."""

    identity_path: Path
    socket_directory: Path
    """Private directory for the control sockets; created with mode 0700."""
    listen_addresses: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_addresses: tuple[str, ...] = ()
    """What others shall dial, if not what is listened on."""
    binary: Path | None = None
    """p2pd to run instead of hivemind's."""
    start_timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class LibP2pPeer:
    """A peer p2pd is connected to."""

    peer_id: PeerId
    addresses: tuple[str, ...]


class P2pd:
    """A running p2pd. Made by :func:`start`."""

    def __init__(self, p2p: Any, socket_directory: Path, start_timeout_seconds: float) -> None:
        self._p2p = p2p
        self._start_timeout_seconds = start_timeout_seconds
        self._socket_directory = socket_directory
        self._server: asyncio.Server | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._call_slots = asyncio.Semaphore(_SIMULTANEOUS_CALLS_MAX)

    @property
    def hivemind_p2p(self) -> Any:
        """hivemind's ``P2P`` object, for its DHT."""
        return self._p2p

    @property
    def process_id(self) -> int:
        """The process id of p2pd."""
        return int(self._p2p._child.pid)

    async def wait_exit(self) -> int:
        """Return the exit status once the process has ended (negative: killed by that signal)."""
        return int(await self._p2p._child.wait())

    async def ping(self, timeout_seconds: float) -> None:
        """Return once p2pd answered.

        Raises:
            UnavailableError: it did not answer in time.
        """
        await self.listen_addresses(timeout_seconds)

    async def listen_addresses(self, timeout_seconds: float) -> tuple[str, ...]:
        """Return the addresses p2pd listens on or announces, without the peer part.

        Raises:
            UnavailableError: it did not answer in time.
        """
        protocol = _control_protocol()
        response = await self._call(protocol.Request(type=protocol.Request.IDENTIFY), timeout_seconds)
        return _to_texts(response.identify.addrs)

    def can_dial(self, address: str) -> bool:
        """Return whether the text is an address that :meth:`connect` takes."""
        try:
            addresses.check_address(address)
        except UsageError:
            return False
        return _to_bytes(address) is not None

    async def connect(self, peer_id: PeerId, peer_addresses: Sequence[str], timeout_seconds: float) -> None:
        """Connect to a peer at the given addresses, or those p2pd already knows.

        Raises:
            UnavailableError: with p2pd's words; one line per address where it tried some.
        """
        protocol = _control_protocol()
        request = protocol.Request(
            type=protocol.Request.CONNECT,
            connect=protocol.ConnectRequest(peer=to_libp2p_bytes(peer_id), addrs=list(map(_to_bytes, peer_addresses))),
        )
        await self._call(request, timeout_seconds)

    async def disconnect(self, peer_id: PeerId, timeout_seconds: float) -> None:
        """End every connection to a peer, and the streams on them; the next stream makes a new one.

        Raises:
            UnavailableError: p2pd did not answer in time.
        """
        protocol = _control_protocol()
        whom = protocol.DisconnectRequest(peer=to_libp2p_bytes(peer_id))
        await self._call(protocol.Request(type=protocol.Request.DISCONNECT, disconnect=whom), timeout_seconds)

    async def list_peers(self, timeout_seconds: float) -> list[LibP2pPeer]:
        """Return the connected peers whose key is Ed25519.

        Raises:
            UnavailableError: p2pd did not answer in time.
        """
        protocol = _control_protocol()
        response = await self._call(protocol.Request(type=protocol.Request.LIST_PEERS), timeout_seconds)
        peers = []
        for peer in response.peers:
            with contextlib.suppress(RemoteProtocolError):  # other software with other keys may be connected too
                peers.append(LibP2pPeer(from_libp2p_bytes(peer.id), _to_texts(peer.addrs)))
        return peers

    async def open_stream(self, peer_id: PeerId, name: str, timeout_seconds: float) -> RawStream:
        """Open a raw stream to the peer's handler ``name``; the caller closes the writer.

        Raises:
            UnavailableError: the peer cannot be reached, has no such handler, or did not answer in time.
        """
        protocol = _control_protocol()
        request = protocol.Request(
            type=protocol.Request.STREAM_OPEN,
            streamOpen=protocol.StreamOpenRequest(peer=to_libp2p_bytes(peer_id), proto=[name]),
        )
        async with deadline(timeout_seconds, "opening a stream"), self._call_slots:
            reader, writer = await self._open_control()
            try:
                await _exchange(reader, writer, request)
            except BaseException:
                writer.transport.abort()
                raise
            return reader, writer

    async def serve(self, name: str, handler: StreamHandler) -> None:
        """Have ``handler`` serve every incoming stream of that name, from the moment this returns.

        Raises:
            UnavailableError: p2pd did not take the registration.
        """

        async def serve_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            info = _control_protocol().StreamInfo()
            try:
                async with deadline(_STREAM_INFO_SECONDS, "p2pd's word on an incoming stream"):
                    await _read_control_message(reader, info)
            except UnavailableError as error:
                logger.debug("incoming stream without a sender: %s", error)
                writer.transport.abort()
                return
            serve_one = self._handlers.get(info.proto)
            if serve_one is None:
                writer.transport.abort()
                return
            # This task ends here either way; the streams of Python 3.11 print a cancelled one as an error.
            with contextlib.suppress(asyncio.CancelledError):
                await serve_one(bytes(info.peer), reader, writer)

        self._handlers[name] = handler
        if self._server is None:
            path = self._p2p._client_listen_maddr["unix"]
            self._server = await asyncio.start_unix_server(
                serve_stream, path, limit=STREAM_BUFFER_SIZE_BYTES, backlog=_INCOMING_BACKLOG
            )
        protocol = _control_protocol()
        registration = protocol.StreamHandlerRequest(
            addr=self._p2p._client_listen_maddr.to_bytes(), proto=[name], balanced=False
        )
        # Part of the start: where fifty nodes start at once, a p2pd that is up takes long to answer (A-PROC-5).
        await self._call(
            protocol.Request(type=protocol.Request.STREAM_HANDLER, streamHandler=registration),
            self._start_timeout_seconds,
        )

    def abandon(self) -> None:
        """Kill the process and remove its sockets, without waiting: this process is about to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)
        remove_sockets(self._socket_directory)

    async def close(self) -> None:
        """End the process and remove its sockets; a process that does not react is killed."""
        child = self._p2p._child
        if self._server is not None:
            self._server.close()
        control = self._p2p._client.control
        loose = [task for task in (control._read_task, control._write_task) if task is not None]
        self._p2p._terminate()
        # hivemind never looks at these: one that failed with its p2pd would be printed when it is forgotten
        await asyncio.gather(*loose, return_exceptions=True)
        try:
            async with asyncio.timeout(_EXIT_WAIT_SECONDS):
                await child.wait()
        except TimeoutError:
            # a stopped process does not see SIGTERM before it continues
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        finally:
            remove_sockets(self._socket_directory)

    async def _call(self, request: Any, timeout_seconds: float) -> Any:
        async with deadline(timeout_seconds, "p2pd"), self._call_slots:
            reader, writer = await self._open_control()
            try:
                return await _exchange(reader, writer, request)
            finally:
                writer.transport.abort()

    async def _open_control(self) -> RawStream:
        path = self._p2p._daemon_listen_maddr["unix"]
        try:
            return await asyncio.open_unix_connection(path, limit=STREAM_BUFFER_SIZE_BYTES)
        except OSError as error:
            raise UnavailableError(f"p2pd cannot be reached: {error.strerror}") from error


async def start(settings: P2pdSettings, on_progress: Callable[[str], None] = lambda _: None) -> P2pd:
    """Start p2pd and return once it answers.

    Args:
        settings: What to start.
        on_progress: Told every 5 seconds what is being waited for.

    Raises:
        P2pdError: the binary cannot run here.
        AddressInUseError: another process listens on one of the ports.
        ConfigError: an address, the key file or the socket directory is wrong.
        UnavailableError: p2pd did not come up in time.
    """
    if not settings.identity_path.is_file():
        # hivemind would make another key there, and the node would speak under two names.
        raise ConfigError(f"the key file {settings.identity_path} is gone: restore it, then start the node again")
    for address in settings.announce_addresses:
        addresses.check_announced(address)
    for address in settings.listen_addresses:
        addresses.check_address(address)
    binary = settings.binary or p2pd_binary.find()
    p2pd_binary.check(binary)
    for address in settings.listen_addresses:
        await _check_port_free(address)
    directory = prepare_socket_directory(settings.socket_directory)
    async with _progress("hivemind to load", on_progress):
        await hivemind_repairs.load()
    async with _progress("p2pd to start", on_progress):
        p2p = await _create(settings, binary, directory)
    return P2pd(p2p, directory, settings.start_timeout_seconds)


def prepare_socket_directory(wanted: Path) -> Path:
    """Return a private directory for sockets, emptied of a killed predecessor's.

    Unix socket paths are short: where ``wanted`` is too deep, a directory of this user's under
    ``/tmp`` stands in for it, named by the digest of ``wanted``.

    Raises:
        ConfigError: the directory belongs to somebody else or is open to others.
        StorageError: it cannot be made.
    """
    directory = wanted.absolute()
    if len(os.fsencode(directory)) + _SOCKET_NAME_SIZE_MAX > _SOCKET_PATH_SIZE_MAX:
        name = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
        directory = Path(f"/tmp/pulsenet-{os.geteuid()}-{name}")  # noqa: S108  private: mode and owner are checked below
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise StorageError(f"cannot make the socket directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"the socket directory {directory} belongs to somebody else: remove it or choose another")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"the socket directory {directory} is open to others: run chmod 700 {directory}")
    remove_sockets(directory)
    return directory


def remove_sockets(directory: Path) -> None:
    """Remove p2pd's sockets from a directory that no running p2pd uses."""
    for pattern in _SOCKET_PATTERNS:
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


async def _create(settings: P2pdSettings, binary: Path, directory: Path) -> Any:
    p2p_module = importlib.import_module("hivemind.p2p.p2p_daemon")
    base: Any = p2p_module.P2P

    def make_process_args(*arguments: Any, **options: Any) -> list[str]:
        made: list[str] = base._make_process_args(*arguments, **options)
        return [str(binary), *made[1:]]

    members = {"_UNIX_SOCKET_PREFIX": f"/unix{directory}/", "_make_process_args": staticmethod(make_process_args)}
    p2p_type: Any = type("PulsenetP2P", (base,), members)
    try:
        return await p2p_type.create(
            identity_path=str(settings.identity_path),
            host_maddrs=list(settings.listen_addresses),
            announce_maddrs=list(settings.announce_addresses) or None,
            nat_port_map=False,
            use_relay=False,
            check_if_identity_free=False,
            startup_timeout=settings.start_timeout_seconds,
        )
    except p2p_module.P2PDaemonError as error:
        text = str(error)
        if "address already in use" in text:
            raise AddressInUseError(f"cannot listen: {text.rpartition('[')[2].rstrip(']')}") from error
        if "failed to start in" in text:
            limit = settings.start_timeout_seconds
            raise UnavailableError(f"p2pd did not start within {limit:g} s: raise --start-timeout-seconds") from error
        raise P2pdError(f"p2pd cannot run: {binary}: {text}") from error
    except OSError as error:
        raise P2pdError(f"p2pd cannot run: {binary}: its control socket failed: {error}") from error


async def _check_port_free(address: str) -> None:
    """Refuse a port another process listens on: libp2p would share it in silence (A-NET-2)."""
    port = addresses.get_port(address)
    if port == 0 or address.split("/")[1] not in ("ip4", "ip6"):
        return
    family = socket.AF_INET if address.split("/")[1] == "ip4" else socket.AF_INET6
    kind = socket.SOCK_STREAM if address.split("/")[3] == "tcp" else socket.SOCK_DGRAM
    host = addresses.get_host(address)
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + _PORT_WAIT_SECONDS
    while True:
        with socket.socket(family, kind) as probe:
            if kind is socket.SOCK_STREAM:
                # connections of an earlier instance in TIME_WAIT do not count, listeners still do
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if loop.time() >= give_up_at:
                    raise AddressInUseError(
                        f"cannot listen on {host} port {port}: {error.strerror}; choose another with --listen"
                    ) from error
            else:
                return
        await asyncio.sleep(0.2)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any) -> Any:
    """Send one control request and return p2pd's answer."""
    utils = importlib.import_module("hivemind.p2p.p2p_daemon_bindings.utils")
    protocol = _control_protocol()
    response = protocol.Response()
    try:
        await utils.write_pbmsg(writer, request)
    except OSError as error:
        raise UnavailableError(f"p2pd broke off: {error}") from error
    await _read_control_message(reader, response)
    if response.type == protocol.Response.ERROR:
        raise UnavailableError(str(response.error.msg))
    return response


async def _read_control_message(reader: asyncio.StreamReader, message: Any) -> None:
    """Fill a protobuf message from the control socket; UnavailableError when that breaks off."""
    utils = importlib.import_module("hivemind.p2p.p2p_daemon_bindings.utils")
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    try:
        size_bytes = await utils.read_unsigned_varint(reader)
        if size_bytes > _REPLY_SIZE_BYTES_MAX:
            raise UnavailableError(f"p2pd sent {size_bytes} bytes")
        message.ParseFromString(await reader.readexactly(size_bytes))
    except (OSError, EOFError, ValueError, decode_error) as error:
        raise UnavailableError(f"p2pd broke off: {error}") from error


@contextlib.asynccontextmanager
async def deadline(seconds: float, waited_for: str) -> AsyncIterator[None]:
    """Limit the block to ``seconds``; UnavailableError beyond."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise UnavailableError(f"timed out after {seconds:g} s: {waited_for}") from error


@contextlib.asynccontextmanager
async def _progress(waited_for: str, on_progress: Callable[[str], None]) -> AsyncIterator[None]:
    async def report() -> None:
        waited_seconds = 0.0
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            waited_seconds += _PROGRESS_SECONDS
            on_progress(f"waiting for {waited_for} ({waited_seconds:.0f} s)")

    reporter = asyncio.create_task(report())
    try:
        yield
    finally:
        reporter.cancel()


def _control_protocol() -> Any:
    return importlib.import_module("hivemind.proto.p2pd_pb2")


def _to_bytes(address: str) -> bytes | None:
    """Return a multiaddress in binary; ``None`` if the text is none."""
    multiaddr = importlib.import_module("hivemind.utils.multiaddr")
    malformed = importlib.import_module("hivemind.utils.multiaddr.exceptions").Error
    try:
        return bytes(multiaddr.Multiaddr(address).to_bytes())
    except (malformed, ValueError):
        return None


def _to_texts(encoded: Sequence[bytes]) -> tuple[str, ...]:
    """Return multiaddresses as text, without a peer part; those hivemind cannot print are left out."""
    multiaddr = importlib.import_module("hivemind.utils.multiaddr")
    unprintable = importlib.import_module("hivemind.utils.multiaddr.exceptions").Error
    texts: dict[str, None] = {}
    for data in encoded:
        with contextlib.suppress(unprintable, ValueError):
            texts[str(multiaddr.Multiaddr(data)).partition("/p2p/")[0]] = None
    return tuple(texts)
