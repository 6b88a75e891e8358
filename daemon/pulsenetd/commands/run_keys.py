"""Keys as people type them for ``pulsenet run``."""

from __future__ import annotations

import re
from typing import Final

from pulsenet.errors import UsageError
from pulsenet.ids import PeerId

HEX_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")


def parse_key(text: str) -> PeerId:
    """Return the key a person typed: a libp2p peer id or 64 hexadecimal digits.

    Raises:
        UsageError: It is neither.
    """
    from pulsenetd import identity

    try:
        return PeerId(bytes.fromhex(text)) if HEX_KEY.fullmatch(text) else identity.from_libp2p_text(text)
    except Exception as error:
        raise UsageError(f"'{text}' is not a key: give a peer id (12D3KooW...) or 64 hexadecimal digits") from error


def parse_new_key(text: str) -> PeerId:
    """Return the key of somebody who is to be listed.

    Raises:
        UsageError: It is no key, or its bytes are no point of the curve, so that nobody could ever sign with it, or one
            of those for which anybody can, as of 64 zeros.
    """
    from pulsenetd import identity

    key = parse_key(text)
    if not identity.is_on_curve(key) or identity.is_of_small_order(key):
        raise UsageError(f"'{text}' is nobody's key: copy it again from what 'pulsenet keygen' or its node printed")
    return key
