"""What this node believed when it last ran."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import Descriptor, JoinToken
from pulsenet.chain.signing import Verify, decode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import ConfigError, StorageError
from pulsenet.ids import RunId, Version, short
from pulsenet.node.news import TRUST_KEY
from pulsenet.wire.schema import decode_value
from pulsenetd.logs import logger
from pulsenetd.storage.store import Store

LOST_TEXT: Final = (
    "the stored trust state cannot be used (%s): starting from the join token, which trusts no version it does not "
    "hear of from the run's authorities; --version-min gives it a lower bound"
)


def refuse_other_run(store: Store, token: JoinToken) -> None:
    """A store is of one run: its descriptors, and what they made the node believe, are no other's.

    Raises:
        ConfigError: It holds another run than the token's.
    """
    for record in store.records_of_type(Descriptor.TYPE):
        signed = decode_signed(record)
        held = RunId(record_digest(signed))
        if decode_value(Descriptor, signed.payload).revision == 0 and held != token.run_id:
            raise ConfigError(
                f"this directory holds a node of another run ({short(held)}..., not {short(token.run_id)}...); "
                "give this one a directory of its own with --data-dir"
            )


def open_trust(store: Store, token: JoinToken, verify: Verify, version_min: Version | None = None) -> Trust:
    """Restore the node's beliefs, or begin with the token's; a damaged state is said aloud (A-AUTH-7).

    Args:
        version_min: The operator's lower bound: no head below it is believed.
    """
    data = store.state(TRUST_KEY)
    if data is not None:
        try:
            return Trust.restore(data, token.run_id, verify, token.revision_min, version_min)
        except StorageError as error:
            logger.warning(LOST_TEXT, error)
    return Trust(token.run_id, verify, token.revision_min, version_min)
