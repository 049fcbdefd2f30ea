"""Each death of a rank has the words of the rank that died, however late the agent looks."""

from __future__ import annotations

import logging
from pathlib import Path

from services.learner.ranks.deaths import DeathsHandler, RankDeaths

SAID = "failed (exitcode: %s) local_rank: %s (pid: %s)"


def test_two_deaths_that_are_seen_together_have_an_error_each(tmp_path: Path) -> None:
    error_file = tmp_path / "error.txt"
    handler, deaths = DeathsHandler(tmp_path, error_file), RankDeaths(tmp_path)
    for code, error in ((1, "rank 0: ValueError: one\ntwo"), (1, "rank 0: OSError: three"), (3, None)):
        if error is not None:
            error_file.write_text(error)
        handler.emit(logging.LogRecord("torch", logging.ERROR, "", 0, SAID, (code, 0, 17), None))
    causes = [death.cause for death in deaths.check()]
    assert causes == ["rank 0: ValueError: one two", "rank 0: OSError: three", "rank 0 ended with exit code 3"]
    assert deaths.check() == []
