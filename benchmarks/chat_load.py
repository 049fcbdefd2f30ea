"""What people who talk to a policy cost its training: one job, windows without and with clients in turn.

    python benchmarks/chat_load.py [--clients 4] [--pairs 6] [--window 20]

A whole stack trains the demo's tiny policy (learner and rollout server on one core each, as `millrace up` places them). In every
other window the clients ask for streamed answers, one after another without a pause. Windows come in pairs, now the one first and now the
other, and ratios are taken within a pair: what drifts by itself (accept rate, lengths, the machine's other work) cancels out.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from examples.demo.charlm_tokenizer import QUESTION
from millrace.connection import find_token
from millrace.gateway import GatewayClient, GatewayError
from services.cli.up import detach, run_down
from services.common.service.stack_state import UpState

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 20
SETTLE_S = 2.0
MAX_TOKENS = 16


@dataclass
class Chats:
    """What the clients of one window saw."""

    answers: int = 0
    refused: int = 0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Window:
    """One window's figures."""

    clients: int
    generated_tokens_per_s: float
    steps_per_min: float
    chats: Chats
    seconds: float


def main() -> None:
    """Prints the table and the medians."""
    parser = argparse.ArgumentParser(description="Training throughput with and without chats.")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=6, help="windows without, and as many with, clients")
    parser.add_argument("--window", type=float, default=20.0, help="seconds")
    options = parser.parse_args()
    models = ROOT / ".millrace" / "models"
    maker = [sys.executable, "-m", "examples.demo.models", "tiny", "--out", str(models / "tiny")]
    subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    os.environ["MILLRACE_MODEL_ROOTS"] = f'["{models}"]'
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder)) as state:
        windows = measure(state, models / "tiny", options.clients, options.pairs, options.window)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    report(windows, options.clients)


@contextmanager
def stack(home: Path) -> Iterator[UpState]:
    """A stack of its own."""
    state = detach(home, ["--port", "0"], lambda _: None)
    try:
        yield state
    except Exception:
        for path in sorted((home / "logs").glob("*.log")):
            print(f"--- {path.name}\n{path.read_text()[-2000:]}", file=sys.stderr)
        raise
    finally:
        run_down(home, lambda _: None)


def measure(state: UpState, model: Path, clients: int, pairs: int, window_s: float) -> list[Window]:
    """Submits the job, waits until it is warm, and takes the windows."""
    token = find_token(state.token_file)
    with GatewayClient(state.url, token) as client:
        job = client.submit(job_spec(model))["id"]
        while client.job(job)["step"] < WARM_UP_STEPS:
            time.sleep(0.5)
        drive(state, token, job, clients, 3.0)  # the first chat compiles and connects
        windows = []
        for pair in range(pairs):
            for count in (0, clients) if pair % 2 == 0 else (clients, 0):
                time.sleep(SETTLE_S)
                windows.append(take(client, state, token, job, count, window_s))
        client.cancel(job)
        return windows


def job_spec(model: Path) -> dict[str, Any]:
    """The demo's job, without evaluation and without an end."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "deploy/config/jobs/demo.yaml").read_text())
    spec["model"]["path"] = str(model)
    spec["learner"]["steps"] = 100_000
    spec["checkpoint"] = {"interval_steps": 10_000}
    spec["eval"] = {"enabled": False}
    return spec


def take(client: GatewayClient, state: UpState, token: str | None, job: str, clients: int, window_s: float) -> Window:
    """One window."""
    step = client.job(job)["step"]
    before, began = generated_tokens(client), time.time()
    chats = drive(state, token, job, clients, window_s)
    after, ended = generated_tokens(client), time.time()
    times = [record["at"] for record in client.steps(job, max(1, step - 1)) if began <= record["at"] <= ended]
    rate = 60 * (len(times) - 1) / (times[-1] - times[0])
    return Window(clients, (after - before) / (ended - began), rate, chats, ended - began)


def generated_tokens(client: GatewayClient) -> float:
    """Response tokens that the rollout servers have sampled for training so far."""
    total = 0.0
    for worker in client.workers():
        if worker["kind"] == "rollout":
            text = httpx.get(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=5, trust_env=False).text
            for family in text_string_to_metric_families(text):
                total += sum(s.value for s in family.samples if s.name == "millrace_rollout_generated_tokens_total")
    return total


def drive(state: UpState, token: str | None, job: str, clients: int, seconds: float) -> Chats:
    """Clients that ask one thing after another, for so many seconds."""
    chats, until = Chats(), time.monotonic() + seconds
    threads = [
        threading.Thread(target=talk, args=(state.url, token, job, number, until, chats)) for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, until - time.monotonic()))
    for thread in threads:
        thread.join()
    return chats


def talk(url: str, token: str | None, job: str, number: int, until: float, chats: Chats) -> None:
    """One client. It stands for people elsewhere, so it takes what computing time is left."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    turn = 0
    with GatewayClient(url, token) as client:
        while time.monotonic() < until:
            turn += 1
            content = f"{QUESTION}{number + 1} + {turn % 10} + 4 ="
            body = {"model": job, "messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS}
            asked, first, tokens = time.monotonic(), None, 0
            try:
                for chunk in client.chat(body):
                    if chunk["choices"][0]["delta"].get("content"):
                        first = first or time.monotonic() - asked
                        tokens += 1
            except GatewayError as error:
                if not error.passing:
                    raise
                with chats.lock:
                    chats.refused += 1
                continue
            with chats.lock:
                chats.answers += 1
                chats.tokens += tokens
                chats.first_token_s += [first] if first is not None else []


def report(windows: list[Window], clients: int) -> None:
    """The table, the medians, the ratios."""
    print("clients  generated tok/s  steps/min  answers/s  chat tok/s  first token s (median)  refused")
    for window in windows:
        chats = window.chats
        first = f"{statistics.median(chats.first_token_s):.3f}" if chats.first_token_s else "-"
        print(
            f"{window.clients:7d}  {window.generated_tokens_per_s:15.0f}  {window.steps_per_min:9.1f}"
            f"  {chats.answers / window.seconds:9.1f}  {chats.tokens / window.seconds:10.0f}  {first:>22}  {chats.refused:7d}"
        )
    quiet, busy = [w for w in windows if not w.clients], [w for w in windows if w.clients]
    for name, values in (
        (
            "generated tok/s",
            [(a.generated_tokens_per_s, b.generated_tokens_per_s) for a, b in zip(quiet, busy, strict=True)],
        ),
        ("steps/min", [(a.steps_per_min, b.steps_per_min) for a, b in zip(quiet, busy, strict=True)]),
    ):
        without, with_chats = (statistics.median(column) for column in zip(*values, strict=True))
        ratios = sorted(b / a for a, b in values)
        print(
            f"{name}: median {without:.1f} without chats, {with_chats:.1f} with {clients} clients;"
            f" ratio within a pair {statistics.median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
