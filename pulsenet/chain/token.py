"""Join tokens as text that survives copying (SPEC section 7).

The text is ``pulse1`` and then, in lower-case base32 without padding, the token's canonical msgpack
followed by the first four bytes of its BLAKE3. Base32 has no letters that a shell, a chat program or a
double click would break.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from pulsenet import limits
from pulsenet.chain.records import JoinToken
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import compute_digest
from pulsenet.wire.schema import decode_value, encode_value

PREFIX: Final = "pulse1"
CHECKSUM_SIZE_BYTES: Final = 4
TEXT_SIZE_MAX: Final = 2 * (limits.ADDRESSES_MAX * limits.ADDRESS_SIZE_BYTES_MAX + 1024)
"""Characters of a token; base32 takes 1.6 a byte."""


def encode_token(token: JoinToken) -> str:
    """Return the token as one word of text."""
    data = encode_value(token)
    data += compute_digest(data)[:CHECKSUM_SIZE_BYTES]
    return PREFIX + base64.b32encode(data).decode("ascii").rstrip("=").lower()


def decode_token(text: str) -> JoinToken:
    """Return the token in ``text``; white space and letter case do not matter.

    Raises:
        RemoteProtocolError: ``token`` for text that was not copied whole, ``decode`` or ``schema`` for a
            token of another format.
    """
    if len(text) > TEXT_SIZE_MAX:
        raise RemoteProtocolError("token", f"{len(text)} characters are no join token")
    word = "".join(text.split()).lower()
    if not word.startswith(PREFIX):
        raise RemoteProtocolError("token", f"a join token starts with {PREFIX!r}")
    letters = word[len(PREFIX) :].upper()
    try:
        data = base64.b32decode(letters + "=" * (-len(letters) % 8))
    except (binascii.Error, ValueError) as error:
        raise RemoteProtocolError("token", "not base32: was it copied whole?") from error
    body, checksum = data[:-CHECKSUM_SIZE_BYTES], data[-CHECKSUM_SIZE_BYTES:]
    if base64.b32encode(data).decode("ascii").rstrip("=") != letters or compute_digest(body)[:4] != checksum:
        raise RemoteProtocolError("token", "the checksum does not match: was it copied whole?")
    return decode_value(JoinToken, body)
