"""What an engine's processes print, over real processes: it reaches our log, the descriptors come back, and a cause is found."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.common.service import logs
from services.common.service.logs import log_context
from services.rollout.engine import output as engine_output
from services.rollout.engine.output import EngineOutput

DIES = """
import sys
print("(EngineCore pid=7) WARNING 11-22 18:00:00 [core.py:1] Enforce eager set")
print("(Worker pid=8) ERROR 11-22 18:00:01 [worker.py:2] ValueError: Head size 16 is not supported by TORCH_SDPA.")
sys.stderr.write("(EngineCore pid=7) ERROR 11-22 18:00:01 [core.py:3] RuntimeError: Worker failed, see the root cause above\\n")
sys.stderr.write("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
"""


def started(output: EngineOutput, code: str) -> subprocess.Popen[bytes]:
    with output.captured():
        return subprocess.Popen([sys.executable, "-c", code])


def run(output: EngineOutput, code: str) -> None:
    started(output, code).wait(30)


def test_the_cause_is_the_newest_line_that_names_one_without_its_loggers_prefix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    output = EngineOutput()
    run(output, DIES)
    assert output.last_error() == "ValueError: Head size 16 is not supported by TORCH_SDPA."
    output.close()
    levels = {record.levelname for record in caplog.records if record.name == engine_output.log.name}
    assert levels == {"WARNING", "ERROR", "INFO"}


REPEATS = """
for number in range(50):
    print(f"(Worker pid=8) WARNING 11-22 18:00:{number:02} [layerwise.py:266] RotaryEmbedding: Failed to load weights", flush=True)
    print("  File 'a.py', line 1", flush=True)
print("(Worker pid=8) WARNING 11-22 18:00:00 [layerwise.py:266] Attention: Failed to load weights")
"""


def test_a_warning_that_the_engine_repeats_is_logged_once_for_each_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = EngineOutput()
    for _ in range(2):
        run(output, REPEATS)
        output.last_error()  # all was read
        output.about()
    output.close()
    said = [record.getMessage() for record in caplog.records if record.name == engine_output.log.name]
    assert sum("RotaryEmbedding" in line for line in said) == sum("Attention" in line for line in said) == 2
    assert sum("a.py" in line for line in said) == 100, "what has no level may be part of a traceback"


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        ("(Worker pid=8) torch.OutOfMemoryError: 4 GiB", "torch.OutOfMemoryError: 4 GiB"),
        ("ERROR 11-22 18:00:01 [a.py:2] it is broken", "it is broken"),
        ("all is well", ""),
        ("", ""),
    ],
)
def test_causes_of_other_forms(printed: str, cause: str) -> None:
    output = EngineOutput()
    run(output, f"print({printed!r})")
    assert output.last_error() == cause
    output.close()


def test_a_line_of_long_ago_is_no_cause_of_what_ends_now(monkeypatch: pytest.MonkeyPatch) -> None:
    output = EngineOutput()
    run(output, DIES)
    assert output.last_error()
    monkeypatch.setattr(engine_output, "RECENT_S", 0.0)
    assert output.last_error() == ""
    output.close()


def test_descriptors_are_what_they_were_and_none_is_left_open() -> None:
    before = [os.fstat(number).st_ino for number in (1, 2)]
    run(EngineOutput(), "")  # the resource tracker starts with the first
    held = psutil.Process().num_fds()
    output = EngineOutput()
    with output.captured():
        assert [os.fstat(number).st_ino for number in (1, 2)] != before
    assert [os.fstat(number).st_ino for number in (1, 2)] == before
    output.close()
    until = time.monotonic() + 10
    while psutil.Process().num_fds() > held and time.monotonic() < until:
        time.sleep(0.05)  # the thread reads to the end
    assert psutil.Process().num_fds() <= held


def test_output_without_an_end_or_without_a_line_is_bounded() -> None:
    output = EngineOutput()
    run(output, "import sys; sys.stdout.write('x' * 50_000_000)")
    run_lines = [line for _, line in output._lines]
    output.close()
    run_lines += [line for _, line in output._lines]
    assert max(map(len, run_lines)) <= engine_output.LINE_CHARS


def test_the_process_own_log_is_not_taken_for_the_engines_and_carries_on(tmp_path: Path) -> None:
    code = """
import logging, subprocess, sys
from services.common.service.logs import configure_logging, log_context
from services.rollout.engine.output import EngineOutput
configure_logging("rollout")
with log_context(job_id="demo-1"):
    output = EngineOutput()
with output.captured():
    logging.getLogger("own").info("while it starts")
    child = subprocess.Popen([sys.executable, "-c", "print('ValueError: no')"])
child.wait()
assert output.last_error() == "ValueError: no"
with log_context(job_id="demo-2"):
    output.about()
child = subprocess.run([sys.executable, "-c", "print('not of the engine')"])
output.close()
logging.getLogger("own").info("afterwards")
"""
    log = tmp_path / "log"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, stderr=file, check=True, timeout=60)
    text = log.read_text().splitlines()
    lines = [json.loads(line) for line in text if line.startswith("{")]
    told = [(line["logger"], line.get("job_id"), line["message"]) for line in lines]
    assert ("own", None, "while it starts") in told
    assert ("services.rollout.engine.output", "demo-1", "ValueError: no") in told
    assert told[-1] == ("own", None, "afterwards")
    assert "not of the engine" in text


def test_a_service_that_is_killed_while_an_engine_starts_leaves_no_pipe_that_blocks_it(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys, time
from services.rollout.engine.output import EngineOutput
with EngineOutput().captured():
    child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: print('x' * 1000, flush=True)"])
    open(sys.argv[1], "w").write(str(child.pid))
    time.sleep(600)
"""
    noted = tmp_path / "pid"
    service = subprocess.Popen(
        [sys.executable, "-c", code, str(noted)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 30
    while not (noted.exists() and noted.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    engine = psutil.Process(int(noted.read_text()))
    service.send_signal(signal.SIGKILL)
    service.wait()
    gone, _ = psutil.wait_procs([engine], timeout=10)
    if not gone:
        engine.kill()
    assert gone, "what prints into a pipe without a reader ends"


def test_lines_are_of_the_job_that_the_engine_serves(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    seen: list[object] = []
    with log_context(job_id="demo-1"):
        output = EngineOutput()

    class Spy(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == engine_output.log.name:
                seen.append(logs._context.get().get("job_id"))

    spy = Spy()
    engine_output.log.addHandler(spy)
    try:
        engine = started(
            output, "print('one', flush=True)\nwhile not len(__import__('os').listdir('.')): pass\nprint('two')"
        )
        while not seen:
            time.sleep(0.01)
        with log_context(job_id="demo-2"):
            output.about()
        (tmp_path / "go").touch()
        engine.wait(30)
        output.last_error()
    finally:
        engine_output.log.removeHandler(spy)
        output.close()
    assert seen == ["demo-1", "demo-2"]
