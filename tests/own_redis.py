"""Embedded Redis that a test starts and stops by itself."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from services.cli.stack.children import start_child
from services.cli.stack.redis import EmbeddedRedis

TIMEOUT_S = 30.0


class OwnRedis(EmbeddedRedis):
    """The server of `millrace up` without its supervisor. A later start in the same folder has its data."""

    def __init__(self, folder: Path, *, spare: Path | None = None) -> None:
        super().__init__(folder, spare=spare)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        self.process = start_child(self.argv, log_path=self.folder / "redis.log")
        deadline = time.monotonic() + TIMEOUT_S
        while not self.answers(self.process.pid):
            assert self.process.poll() is None, f"it ended: see {self.folder / 'redis.log'}"
            assert time.monotonic() < deadline, f"it does not answer: see {self.folder / 'redis.log'}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stops the server, where it runs; all its data is on disk."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(TIMEOUT_S)
            finally:
                self.process.kill()
                self.process.wait()
