"""What rollout servers cost the rest: one learner's head, one Redis and the reward service with 1, 8, 64 and 512 servers without a model.

    python benchmarks/scale.py [--servers 1,8,64,512] [--seconds 15] [--apart]

The parts are in benchmarks/simulated; `run.py` says what is measured and how.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "benchmarks.simulated.run", *sys.argv[1:]], cwd=ROOT))
