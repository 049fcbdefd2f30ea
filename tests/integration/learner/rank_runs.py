"""Runs that tests of ranks compare: a reference process that never imports Megatron, and ranks of each number."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learner.platforms import ON_CPU, RANKS

HERE = Path(__file__).parent
TIMEOUT_S = 600.0
"""Of one run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the reference process and the ranks wrote down."""

    root: Path
    reference: dict[str, Any]
    """Per model: the float64 figures."""
    layouts: dict[str, dict[str, Any]]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = load_file(self.root / name)
        return weights

    def logit_error(self, layout: str, model: str) -> float:
        """The largest difference of a layout's logits from those of transformers."""
        expected = self.weights(f"{model}.logits.safetensors")
        logits = self.weights(f"out/{layout}.{model}.logits.safetensors")
        assert logits.keys() == expected.keys()
        return max(float((logits[k] - expected[k]).abs().max()) for k in expected)

    def check_exported(self, layout: str, model: str) -> None:
        """A layout's export has the very tensors of the model's directory, and names the output layer."""
        source = self.weights(f"{model}/model.safetensors")
        exported = self.weights(f"out/{layout}.{model}.exported.safetensors")
        assert exported.keys() == source.keys() | {"lm_head.weight"}
        head = source.get("lm_head.weight", source["model.embed_tokens.weight"])
        assert all(torch.equal(exported[name], tensor) for name, tensor in (source | {"lm_head.weight": head}).items())


def outcome_of(
    kind: str,
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    *,
    slow_argument: str = "",
    backends: tuple[str, ...] = ("megatron", "fsdp2"),
) -> Outcome:
    """A clean process makes models and references; then one, two and, for slow tests, four ranks of each back end run all
    their checks in one start.

    The scripts are `<kind>_reference.py` and `<kind>_ranks.py`; the latter gets `slow_argument` where slow tests were chosen.
    """
    root = folders.mktemp(kind)
    run([str(HERE / f"{kind}_reference.py"), str(root)])
    slow = any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path)
    arguments = [str(root), slow_argument] if slow and slow_argument else [str(root)]
    layouts: dict[str, dict[str, Any]] = {}
    for backend, ranks in itertools.product(backends, RANKS if slow else RANKS[:2]):
        if backend == "fsdp2" and ranks == 1 and ON_CPU and not slow:
            continue  # none of its layouts is quick
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run([*launch, str(HERE / f"{kind}_ranks.py"), *arguments, backend])
        layouts |= json.loads((root / "out" / f"{backend}-ranks{ranks}.json").read_text())
    return Outcome(root, json.loads((root / "reference.json").read_text()), layouts)


def run(arguments: list[str]) -> None:
    """Runs Python on the arguments; what it printed is in the failure."""
    root = str(HERE.parents[2])
    environment = os.environ | {
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
