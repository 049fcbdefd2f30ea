"""Background writer of one rank's part of a checkpoint: a thread beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from services.common.checkpoints.manifest import WrittenFile


def files_of(reports: Iterable[dict[str, Any]]) -> list[WrittenFile]:
    """The files that all ranks have written, from their reports, rank 0's first.

    Raises:
        OSError: a rank could not write its part; with the system's errno, if there is one.
    """
    files = []
    for rank, report in enumerate(reports):
        if report["error"]:
            raise OSError(report["errno"], f"rank {rank}: {report['error']}")
        files += [WrittenFile(**file) for file in report["files"]]
    return files


class BackgroundWriter:
    """Writes one part at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.report: dict[str, Any] | None = None
        """JSON values for the other ranks: None until the end, then {"files": […], "errno": null, "error": ""}.

        After an error `error` has its message, and `errno` the number of an OSError.
        """

    def start(self, write: Callable[[], Iterable[WrittenFile]]) -> None:
        """Begins to write; RuntimeError if the previous write has not ended."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("a checkpoint is still being written")
        self.report = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], Iterable[WrittenFile]]) -> None:
        try:
            files = [asdict(file) for file in write()]
        except Exception as error:  # noqa: BLE001  whatever it is, the head gets a report
            number = error.errno if isinstance(error, OSError) else None
            self.report = {"files": [], "errno": number, "error": f"{type(error).__name__}: {error}"}
        else:
            self.report = {"files": files, "errno": None, "error": ""}
