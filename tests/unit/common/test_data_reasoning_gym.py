"""reasoning-gym without the plots of its dependencies."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from services.common.data.reasoning_gym import import_reasoning_gym
gym = import_reasoning_gym()
assert "matplotlib" not in sys.modules
dataset = gym.create_dataset("game_of_life", seed=1, size=2)
assert dataset.score_answer(dataset[0]["answer"], entry=dataset[0]) == 1.0
import matplotlib.pyplot
assert callable(matplotlib.pyplot.plot)
assert import_reasoning_gym() is gym
"""


def test_cellular_automata_work_without_matplotlib_and_who_imports_it_later_gets_the_real_one() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
