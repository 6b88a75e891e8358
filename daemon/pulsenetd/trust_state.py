"""What this node believed when it last ran."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import JoinToken
from pulsenet.chain.signing import Verify
from pulsenet.chain.trust import Trust
from pulsenet.errors import StorageError
from pulsenet.ids import Version
from pulsenet.node.news import TRUST_KEY
from pulsenetd.logs import logger
from pulsenetd.storage.store import Store

LOST_TEXT: Final = (
    "the stored trust state cannot be used (%s): starting from the join token, which trusts no version it does not "
    "hear of from the run's authorities; --version-min gives it a lower bound"
)


def open_trust(store: Store, token: JoinToken, verify: Verify, version_min: Version | None = None) -> Trust:
    """Restore the node's beliefs, or begin with the token's; a damaged state is said aloud (CASES A-AUTH-7).

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
