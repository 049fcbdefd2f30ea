"""One rank's writing of a checkpoint, in a thread beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from services.common.checkpoints.manifest import WrittenFile


def files_of(reports: Iterable[dict[str, Any]]) -> list[WrittenFile]:
    """What all ranks have written, by their reports, rank 0's first.

    Raises:
        OSError: a rank could not write its part; with the number that the system gave, if it did.
    """
    files = []
    for rank, report in enumerate(reports):
        if report["error"]:
            raise OSError(report["errno"], f"rank {rank}: {report['error']}")
        files += [WrittenFile(**file) for file in report["files"]]
    return files


class BackgroundWriter:
    """One job at a time; what became of it is JSON values, for the other ranks.

    A report is None while it is being written, then {"files": […], "errno": null, "error": ""}; an error has its message and, of an
    OSError, the number.
    """

    def __init__(self) -> None:
        """Nothing to write."""
        self._thread: threading.Thread | None = None
        self._report: dict[str, Any] | None = None

    def start(self, write: Callable[[], Iterable[WrittenFile]]) -> None:
        """Begins to write.

        Raises:
            RuntimeError: the writing begun before has not ended.
        """
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("a checkpoint is still being written")
        self._report = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def report(self) -> dict[str, Any] | None:
        """What became of it; None before the end."""
        return self._report

    def join(self) -> None:
        """Waits for the end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], Iterable[WrittenFile]]) -> None:
        try:
            files = [asdict(file) for file in write()]
        except Exception as error:  # noqa: BLE001  whatever it is, the head is told
            number = error.errno if isinstance(error, OSError) else None
            self._report = {"files": [], "errno": number, "error": f"{type(error).__name__}: {error}"}
        else:
            self._report = {"files": files, "errno": None, "error": ""}
