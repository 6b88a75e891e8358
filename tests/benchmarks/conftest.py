"""Scripts that tests load find what they share, as they do when they are started."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
