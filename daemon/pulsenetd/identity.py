"""A node's key: one Ed25519 key that is its peer id, signs its records and secures its connections."""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError
from pulsenet.ids import PEER_ID_SIZE_BYTES, PeerId

# libp2p's key files and peer ids are tiny protobuf messages with one possible encoding each
# (libp2p specs, peer-ids: "Keys"), so they are fixed prefixes here and need no protobuf library.
_PRIVATE_KEY_PREFIX: Final = bytes.fromhex("08011240")
"""PrivateKey {type = Ed25519, data = 64 bytes: seed, then public key}."""

_PEER_ID_PREFIX: Final = bytes.fromhex("0024080112") + b"\x20"
"""Identity multihash of PublicKey {type = Ed25519, data = 32 bytes}: the key sits inside the peer id."""

_FIELD_PRIME: Final = 2**255 - 19
_CURVE_D: Final = -121665 * pow(121666, -1, _FIELD_PRIME) % _FIELD_PRIME

_SEED_SIZE_BYTES: Final = 32
_REMEDY: Final = "restore it, or move it away for a new identity"
_KEY_FILE_SIZE_BYTES: Final = len(_PRIVATE_KEY_PREFIX) + _SEED_SIZE_BYTES + PEER_ID_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key pair and the file it lives in."""

    peer_id: PeerId
    path: Path
    """libp2p private key file, as hivemind's ``identity_path`` wants it."""
    _private_key: Ed25519PrivateKey = field(repr=False, compare=False)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of ``message``."""
        return self._private_key.sign(message)


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Return whether ``signature`` over ``message`` was made by ``peer_id``'s key; never raises."""
    try:
        Ed25519PublicKey.from_public_bytes(peer_id).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_on_curve(peer_id: PeerId) -> bool:
    """Return whether the bytes are a point of the curve (RFC 8032, 5.1.3); about half of all are none."""
    y = int.from_bytes(peer_id, "little") & ((1 << 255) - 1)
    if y >= _FIELD_PRIME:
        return False
    above, below = y * y - 1, _CURVE_D * y * y + 1  # x * x is the quotient, and must have a root
    return pow(above * below, (_FIELD_PRIME - 1) // 2, _FIELD_PRIME) in (0, 1)


def is_of_small_order(peer_id: PeerId) -> bool:
    """Return whether a point of the curve is one of the eight for which anybody makes signatures, without a secret."""
    y = int.from_bytes(peer_id, "little") & ((1 << 255) - 1)
    # Of order 1, 2 and 4; and of order 8: its double has a y of 0, which makes x * x the opposite of y * y.
    return y in (0, 1, _FIELD_PRIME - 1) or (_CURVE_D * y**4 + 2 * y * y - 1) % _FIELD_PRIME == 0


def load_or_create(path: Path) -> Identity:
    """Return the identity stored at ``path``, made at random first if there is none.

    The file is private (mode 0600) from its first byte and appears whole or not at all.

    Raises:
        ConfigError: the file can be read by others, belongs to somebody else or is no regular file.
        StorageError: it is damaged, or the disk refuses.
    """
    try:
        return load(path)
    except FileNotFoundError:
        pass
    seed = secrets.token_bytes(_SEED_SIZE_BYTES)
    try:
        _write_new(path, _encode_private_key(seed))
    except FileExistsError:
        pass  # somebody else created it since we looked: theirs is as good as ours
    except OSError as error:
        raise StorageError(f"cannot write the key file {path}: {error.strerror}") from error
    try:
        return load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"the key file {path} is a link that leads nowhere: {_REMEDY}") from error


def load(path: Path) -> Identity:
    """Return the identity stored at ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file can be read by others, belongs to somebody else or is no regular file.
        StorageError: it is damaged, or the disk refuses.
    """
    data = _read_private(path)
    expected = f"{_KEY_FILE_SIZE_BYTES} bytes of a libp2p Ed25519 key"
    if len(data) != _KEY_FILE_SIZE_BYTES or not data.startswith(_PRIVATE_KEY_PREFIX):
        raise StorageError(f"the key file {path} is damaged (not {expected}): {_REMEDY}", "damaged")
    seed = data[len(_PRIVATE_KEY_PREFIX) :][:_SEED_SIZE_BYTES]
    private_key = Ed25519PrivateKey.from_private_bytes(seed)
    public_key = private_key.public_key().public_bytes_raw()
    if data != _encode_private_key(seed):
        raise StorageError(f"the key file {path} is damaged (its halves disagree): {_REMEDY}", "damaged")
    return Identity(peer_id=PeerId(public_key), path=path, _private_key=private_key)


def to_libp2p_bytes(peer_id: PeerId) -> bytes:
    """Return the binary libp2p peer id of a raw public key."""
    assert len(peer_id) == PEER_ID_SIZE_BYTES
    return _PEER_ID_PREFIX + peer_id


def to_libp2p_text(peer_id: PeerId) -> str:
    """Return the peer id as libp2p prints it (``12D3Koo...``)."""
    return base58.b58encode(to_libp2p_bytes(peer_id)).decode("ascii")


def from_libp2p_bytes(data: bytes) -> PeerId:
    """Return the raw public key inside a binary libp2p peer id.

    Raises:
        RemoteProtocolError: ``peer-id``; the id is not that of an Ed25519 key.
    """
    if len(data) != len(_PEER_ID_PREFIX) + PEER_ID_SIZE_BYTES or not data.startswith(_PEER_ID_PREFIX):
        raise RemoteProtocolError("peer-id", f"{data[:64].hex()} is not an Ed25519 peer id")
    return PeerId(data[len(_PEER_ID_PREFIX) :])


def from_libp2p_text(text: str) -> PeerId:
    """Return the raw public key inside a printed libp2p peer id.

    Raises:
        RemoteProtocolError: ``peer-id``; the text is not the id of an Ed25519 key.
    """
    if len(text) > 64:
        raise RemoteProtocolError("peer-id", f"{len(text)} characters")
    try:
        data = base58.b58decode(text)
    except ValueError as error:
        raise RemoteProtocolError("peer-id", f"{text!r} is not base58") from error
    return from_libp2p_bytes(data)


def _encode_private_key(seed: bytes) -> bytes:
    public_key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    return _PRIVATE_KEY_PREFIX + seed + public_key


def _read_private(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"cannot read the key file {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the key file {path} is not a regular file")
        if mode & 0o077:
            raise ConfigError(f"the key file {path} is open to others (mode {mode:04o}): run chmod 600 {path}")
        if status.st_uid != os.geteuid():
            raise ConfigError(f"the key file {path} belongs to user {status.st_uid}, not to {os.geteuid()}")
        return os.read(descriptor, _KEY_FILE_SIZE_BYTES + 1)
    finally:
        os.close(descriptor)


def _write_new(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data``, durable; FileExistsError if it is there already."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # link, not rename: rename would replace the key of an instance that started at the same moment
        os.link(temporary, path)
    finally:
        os.unlink(temporary)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
