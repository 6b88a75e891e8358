"""Examples at the end of the help of ``pulsenet run`` and its actions."""

from __future__ import annotations

from typing import Final

from pulsenetd.parsing import Example

_KEY: Final = "12D3KooW..."
_ROOT: Final = "651de7a3144ed1ed37d1b3cbb38e7a3bd0f74d0a25ff6e2d97ea2d1a0c9f1d22"

CREATE: Final[tuple[Example, ...]] = (
    (f"pulsenet run create myrun --authority {_KEY} --open-inferencers 8", "one key publishes, anybody follows"),
    (f"pulsenet run create secret --authority {_KEY} --private", "only holders of its token find it"),
    (
        f"pulsenet run create together --authority {_KEY} --trainer {_KEY} --algorithm pulseloco --inner-steps 8",
        "trainers that train together",
    ),
)
SHOW: Final[tuple[Example, ...]] = (("pulsenet run show myrun", "its keys, its constants, its join token"),)
TOKEN: Final[tuple[Example, ...]] = (
    ("pulsenet run token myrun", "after the old one ended: one that never does"),
    ("pulsenet run token myrun --expires 48", "nobody joins by it after two days"),
)
CHANGES: Final[dict[str, tuple[Example, ...]]] = {
    "admit": ((f"pulsenet run admit myrun {_KEY} --role inferencer", "its rollouts count from now on"),),
    "revoke": ((f"pulsenet run revoke myrun {_KEY}", "whatever it was, it is no member any more"),),
    "promote": ((f"pulsenet run promote myrun {_KEY}", "a second machine that may publish"),),
    "own": ((f"pulsenet run own myrun {_KEY} --threshold 2", "two owners, and both have to sign"),),
    "disown": ((f"pulsenet run disown myrun {_KEY} --threshold 1", "one owner less"),),
}
EPOCH: Final[tuple[Example, ...]] = (
    (f"pulsenet run epoch myrun --keep 0.57 --root {_ROOT}", "go on after 0.57, whatever was published since"),
    ("pulsenet run epoch myrun --first-number 58", "start anew: no version before counts"),
)
COUNTERSIGN: Final[tuple[Example, ...]] = (
    ("pulsenet run countersign myrun", "the newest revision, as a second owner"),
    ("pulsenet run countersign myrun --epoch", "the newest epoch that the owners opened"),
)
WITHDRAW: Final[tuple[Example, ...]] = (
    ("pulsenet run withdraw myrun", "the owners did not agree on the newest revision"),
)
