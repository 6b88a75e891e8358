"""Every error pulsenet raises on purpose.

::

    PulsenetError
    ├── LocalProtocolError      we misused our own API: fix the code
    ├── RemoteProtocolError     a peer broke the specification: strike the peer
    ├── IntegrityError          bytes do not match their digest, root or signature
    │   ├── PatchMismatchError  a patch was offered to something that is not its base
    │   │   └── StructureError  names, dtypes or shapes are not those of the version
    │   └── TrustError          a signature, key or rule of the run does not hold
    ├── UnavailableError        nobody could answer in time: retry elsewhere
    ├── StorageError            the disk refused: free space, permissions, damage
    └── ConfigError             the operator's input is wrong: say what to change
        └── UsageError          the same, on the command line

The three protocol-side types differ because the reaction differs: fix, strike, retry.
"""


class PulsenetError(Exception):
    """Root of every error raised on purpose."""


class LocalProtocolError(PulsenetError):
    """This process broke the contract of the function it called."""


class RemoteProtocolError(PulsenetError):
    """A peer, a file or a record broke the specification.

    Args:
        code: Stable reason listed in ``proto/SPEC.md``; used in vectors and as a metric label.
        detail: The offending value, for a person.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


class IntegrityError(PulsenetError):
    """Bytes do not match the digest, root or signature that names them."""


class PatchMismatchError(IntegrityError):
    """A patch was offered to weights that are not its base."""


class StructureError(PatchMismatchError):
    """Weights do not have the tensors of the version: other names, dtypes, shapes or ties."""


class TrustError(IntegrityError):
    """A record's signer, signature or history is not what the run allows.

    Args:
        code: Stable reason listed in ``proto/SPEC.md``; used in vectors and as a metric label.
        detail: The offending value, for a person.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


class UnavailableError(PulsenetError):
    """Nobody could answer in time; the same call may succeed later or elsewhere."""


class StorageError(PulsenetError):
    """The disk refused an operation, or holds something damaged (exit code 6).

    Args:
        message: Path, system error and what to do, for a person.
        reason: Stable code: ``enospc``, ``readonly``, ``memory``, ``damaged``, ``locked`` or ``io``.
    """

    def __init__(self, message: str, reason: str = "io") -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(PulsenetError):
    """A configuration file or environment variable is wrong (exit code 78)."""


class UsageError(ConfigError):
    """A command-line argument is wrong (exit code 2)."""
