"""A learner process with a model to train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.learner.peers import Learner
from tests.integration.rollout.conftest import write_model


@pytest.fixture
def learner(redis_url: str, tmp_path: Path) -> Iterator[Learner]:
    write_model(tmp_path / "models" / "tiny")
    made = Learner(redis_url, tmp_path)
    yield made
    made.kill()
