"""The weights' process: hashes, announces and sends what rank 0 has written, while rank 0's interpreter trains.

It ends when its input ends, or with its parent.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from services.common.errors import ConfigError, WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.service.logs import configure_logging, log_context
from services.common.service.process_tree import die_with_parent, end_process
from services.common.weight_sync.server import WeightServer
from services.common.weights.snapshot import PolicyVersion
from services.common.weights.tensor_file import map_snapshot
from services.learner.ranks.heartbeat import HEARTBEAT_DIR_VARIABLE, beat_forever
from services.learner.weights.messages import (
    ORDER,
    Answer,
    BeginTurn,
    Publish,
    Published,
    Refused,
    Reported,
    Serve,
    Serving,
    TurnBegun,
)

_STOP_TIMEOUT_S = 2.0


class Answers:
    """Lines to the head, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def send(self, answer: Answer) -> None:
        """Writes one line."""
        with self._lock:
            sys.stdout.write(answer.model_dump_json() + "\n")
            sys.stdout.flush()

    def report(self, request: pb.ReportRequest) -> None:
        """Passes a rollout server's report on."""
        self.send(
            Reported(
                server=request.server, version=PolicyVersion.of(request.version), error=request.error,
                fetch_s=request.fetch_seconds, pause_s=request.pause_seconds,
            )
        )  # fmt: skip


def serve(first: Serve, answers: Answers) -> None:
    """Does what comes on the input, one after the other."""
    with WeightServer(
        first.job_id, first.host, 0, first.token, advertise_host=first.advertise_host, on_report=answers.report
    ) as server:
        answers.send(Serving(address=server.address))
        for line in sys.stdin:
            match ORDER.validate_json(line):
                case Publish(version=version, path=path):
                    snapshot = map_snapshot(Path(path), version)
                    server.publish(snapshot)
                    answers.send(Published(version=version, digest=snapshot.digest.hex()))
                case BeginTurn(limit_s=limit_s):
                    answers.send(TurnBegun(missing=server.begin_turn(limit_s)))
        server.stop(_STOP_TIMEOUT_S)


def main() -> None:
    """Entry point."""
    die_with_parent()
    first, answers = Serve.model_validate_json(sys.stdin.readline()), Answers()
    configure_logging("learner", first.log_level)
    if HEARTBEAT_DIR_VARIABLE in os.environ:
        beat_forever(Path(os.environ[HEARTBEAT_DIR_VARIABLE]), "weights' process", os.getpid())
    with log_context(job_id=first.job_id):
        try:
            serve(first, answers)
        except (ConfigError, WeightSyncError) as error:
            answers.send(Refused(error=str(error)))
    end_process(0)  # at once: transfers under way are given up


if __name__ == "__main__":
    main()
