"""Unix sockets in private directories: paths of any length, who is at the other end, passing descriptors."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.local.framing import Frame, FrameReader, encode_frame
from pulsenet.local.protocol import LocalMessage, LocalRefusal

SOCKET_DIRECTORY_NAME: Final = "local"
SOCKET_NAME: Final = "daemon.sock"

READ_SIZE_BYTES_MAX: Final = 1 << 20
"""Asked of the kernel at once, so that a large frame does not need its whole size twice."""

TIMEOUT_SECONDS_MAX: Final = 1_000_000.0
"""Sockets count no more than 2^31 milliseconds."""

_ADDRESS_SIZE_BYTES_MAX: Final = 107
"""``sun_path`` has 108 bytes with its final zero."""

_CREDENTIALS: Final = struct.Struct("3i")


def socket_path(data_directory: Path) -> Path:
    """Return where the daemon of a data directory listens."""
    return data_directory / SOCKET_DIRECTORY_NAME / SOCKET_NAME


def use_address(path: Path, act: Callable[[str], None]) -> None:
    """Call ``act`` (a ``bind`` or ``connect``) with an address for ``path`` that fits into ``sun_path``.

    A long path is reached through a descriptor of its directory, so the working directory stays as it is.

    Raises:
        OSError: As ``act``, or the directory cannot be opened.
    """
    if len(os.fsencode(path)) <= _ADDRESS_SIZE_BYTES_MAX:
        act(str(path))
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def read_peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel knows it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return int(uid)


def receive_part(connection: socket.socket, reader: FrameReader) -> Frame | None:
    """Read once and return the frame this completes.

    Raises:
        UnavailableError: The other end closed, perhaps inside a frame.
        RemoteProtocolError: It sent something that is no frame.
        OSError: As ``recvmsg``: ``BlockingIOError`` or ``TimeoutError`` where nothing came.
    """
    size_bytes = min(reader.wanted_size_bytes, READ_SIZE_BYTES_MAX)
    # Without CLOEXEC the memory would be inherited by, and live as long as, every child process.
    data, descriptors, _, _ = socket.recv_fds(connection, size_bytes, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise UnavailableError("the other process closed the connection")
    return reader.feed(data, descriptors)


class Channel:
    """A blocking connection to a daemon: one request at a time, from one thread at a time."""

    def __init__(self, path: Path, timeout_seconds: float) -> None:
        """Connect.

        Raises:
            UnavailableError: Nobody listens there, or somebody who does not own the directory; or this process has no
                descriptor left.
        """
        self._reader = FrameReader()
        with ExitStack() as stack:
            try:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                stack.callback(self.close)
                self._socket.settimeout(timeout_seconds)
                use_address(path, self._socket.connect)
                owner_uid, peer_uid = path.parent.stat().st_uid, read_peer_uid(self._socket)
            except OSError as error:
                raise UnavailableError(f"no daemon answers at {path}: {error.strerror or error}") from error
            if peer_uid != owner_uid:
                raise UnavailableError(f"{path} is served by user {peer_uid}, but belongs to user {owner_uid}")
            stack.pop_all()

    def send(self, message: LocalMessage, *, descriptor: int | None = None, timeout_seconds: float) -> None:
        """Send one frame.

        Raises:
            UnavailableError: The daemon is gone or took nothing in time.
            RemoteProtocolError: It refused and closed before it read this; under the refusal's code.
        """
        data = memoryview(encode_frame(message, descriptor_count=int(descriptor is not None)))
        try:
            self._socket.settimeout(timeout_seconds)
            if descriptor is not None:
                data = data[socket.send_fds(self._socket, [data], [descriptor]) :]
            if data:
                self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._raise_refusal()
            raise UnavailableError("the daemon closed the connection") from error
        except OSError as error:
            raise UnavailableError(f"the daemon went away: {error.strerror or error}") from error

    def _raise_refusal(self) -> None:
        """Raise what the daemon said before it closed, if it said anything."""
        with suppress(UnavailableError, OSError):
            frame = None
            while frame is None:
                frame = receive_part(self._socket, self._reader)
            frame.close()
            if isinstance(frame.message, LocalRefusal):
                raise RemoteProtocolError(frame.message.code, frame.message.detail)

    def receive(self, timeout_seconds: float | None) -> Frame:
        """Wait for one frame; ``None``, and what no socket can count, waits for as long as the daemon lives.

        Raises:
            UnavailableError: The daemon is gone, or said nothing in time.
            RemoteProtocolError: It sent something that is no frame.
        """
        try:
            is_bounded = timeout_seconds is not None and timeout_seconds <= TIMEOUT_SECONDS_MAX
            self._socket.settimeout(timeout_seconds if is_bounded else None)
            frame = None
            while frame is None:
                frame = receive_part(self._socket, self._reader)
            return frame
        except OSError as error:
            raise UnavailableError(f"the daemon went away: {error.strerror or error}") from error

    def is_open(self) -> bool:
        """Return whether the daemon still holds its end; it never speaks first, so anything else is a no."""
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        """Make a call that waits in another thread fail; that thread closes the connection."""
        # An OSError here means that the other end is gone already, which is what was asked for.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._reader.close()
        self._socket.close()
