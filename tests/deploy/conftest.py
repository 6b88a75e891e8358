"""What is offered for deployment is read by the tools it is meant for, and names only what exists."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests are no package: the helpers beside them are found by their directory.
sys.path.insert(0, str(Path(__file__).parent))
