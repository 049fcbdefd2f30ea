"""Makes `scored_groups` importable: test folders are no packages here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
