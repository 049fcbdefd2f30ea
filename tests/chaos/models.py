"""A job judged by a verifier, a judge and a reward model: the endpoint stalls, drops, refuses; the process is killed and stopped."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from services.common.service.process_tree import is_running
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import Journal
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.faults import FIND_S, Options, slay, victim
from tests.chaos.job import job_spec
from tests.chaos.result import Result
from tests.chaos.scripted import script
from tests.chaos.stack import Stack
from tests.judge_server import JudgeServer, judge_thread, refusal
from tests.tiny_classifier import SCORE, write_tiny_classifier

LIMIT_S = 3.0
"""Of a verdict of the judge, and of a batch of the reward model."""
GRACE_S = 0.5
TROUBLE_S = 2.0
"""How long the endpoint's troubles last."""
SHARE = 0.1
"""Weight of the reward model."""

REWARD: dict[str, Any] = {
    "verifiers": {"*": "all"},
    "rubrics": {
        "all": {"verifier_function": ["gsm8k", "graded", "scored"], "verifier_weight": [1.0, 1.0, SHARE], "accuracy_of": "gsm8k"}
    },
    "judges": {"graded": {"endpoint": "chaos", "template": "{response}|{reference}", "timeout_s": LIMIT_S, "requests_at_once": 64}},
    "reward_models": {"scored": {"path": "tiny-reward", "timeout_s": LIMIT_S}},
}  # fmt: skip

Strike = Callable[[Campaign, JudgeServer], None]


def grade(request: dict[str, Any]) -> str:
    """The scripted judge: right answers are worth all, others nothing."""
    response, _, reference = request["messages"][0]["content"].rpartition("|")
    return "[[10]]" if response.split()[-1] == reference else "[[1]]"


def _endpoint(trouble: Any) -> Strike:
    def strike(_: Campaign, server: JudgeServer) -> None:
        server.always = trouble
        time.sleep(TROUBLE_S)
        server.always = None

    return strike


def _killed(running: Campaign, _: JudgeServer) -> None:
    model_process(running.stack).send_signal(signal.SIGKILL)


def _stopped(running: Campaign, _: JudgeServer) -> None:
    """Stops the process, and waits until the service has ended it: a batch is in it, or comes within a moment."""
    process, began = model_process(running.stack), time.monotonic()
    process.send_signal(signal.SIGSTOP)
    running.stack.wait(lambda: not is_running(process), "the end of a stopped reward model", FIND_S)
    running.result.extra.setdefault("stopped for s", []).append(round(time.monotonic() - began, 2))


def _service(running: Campaign, _: JudgeServer) -> None:
    slay(running.stack, "reward")


STRIKES: dict[str, Strike] = {
    "the endpoint stalls": _endpoint("stall"),
    "the endpoint drops": _endpoint("drop"),
    "the endpoint is limited": _endpoint(refusal(429, Retry_After="0.2")),
    "the endpoint is broken": _endpoint(refusal(500)),
    "the reward model is killed": _killed,
    "the reward model is stopped": _stopped,
    "the reward service is killed": _service,
}


def model_process(stack: Stack) -> psutil.Process:
    """The present process of the reward model: a child of the forkserver of that name."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found.extend(_model_processes(victim(stack, "reward")))
        return bool(found)

    stack.wait(look, "a process of the reward model", FIND_S)
    return found[-1]


def _model_processes(service: psutil.Process) -> Iterator[psutil.Process]:
    try:
        for forkserver in service.children():
            if "reward-model" in forkserver.cmdline():
                yield from (child for child in forkserver.children() if is_running(child))
    except psutil.Error:
        return


def models(options: Options, grace_s: float = GRACE_S) -> Result:
    """`count` troubles, each kind in turn; the job goes on after each."""
    write_tiny_classifier(options.home / "models" / "tiny-reward")
    spec = job_spec(steps=ENDLESS, reward=REWARD)
    with judge_thread() as server:
        server.reply = grade
        endpoints = json.dumps({"chaos": {"url": server.url, "model": "scripted"}})
        environment = {"MILLRACE_JUDGE_ENDPOINTS": endpoints, "MILLRACE_REWARD_MODEL_THREADS": "1"}
        name = "judge and reward model in trouble"
        with campaign(options.home, name, options.seed, spec=spec, environment=environment) as running:
            for number in range(options.count):
                strike = list(STRIKES.values())[number % len(STRIKES)]
                running.trial(lambda strike=strike: strike(running, server))  # type: ignore[misc]
            running.finish()
        running.result.violations += [*_held(running, server, grace_s), *_wrong_rewards(running.folder)]
        running.result.extra["requests"] = len(server.requests)
    return running.result


def _held(running: Campaign, server: JudgeServer, grace_s: float) -> Iterator[str]:
    """No place at the endpoint, and no process, is held beyond its limit: of the judge's, one request takes at most half."""
    longest = max(server.held_s, default=0.0)
    running.result.extra["request open longest s"] = round(longest, 2)
    if longest > LIMIT_S / 2 + grace_s:
        yield f"a request was open for {longest:.2f} s, of {LIMIT_S / 2 + grace_s:g} s"
    for seconds in running.result.extra.get("stopped for s", []):
        if seconds > LIMIT_S + 2 * grace_s:  # the batch may have come a moment after the signal
            yield f"a stopped reward model was kept for {seconds} s, of {LIMIT_S + grace_s:g} s"


def _wrong_rewards(folder: Path) -> Iterator[str]:
    """Every reward that was trained is the sum of what all three said: no trouble became a number."""
    for record in Journal(folder / JOURNAL_DIR).records():
        for payload in record.groups:
            scored = decode(ScoredGroup, payload, MIN_ENTRY_BYTES)
            row = script.row_of([int(token) for token in scored.group.prompt_tokens])
            for rollout, verdict in zip(scored.group.rollouts, scored.verdicts, strict=True):
                right = script.is_right(row, [int(token) for token in rollout.tokens])
                expected = 2.0 * right + SHARE * SCORE
                if verdict.reward is not None and abs(verdict.reward - expected) > 1e-3:
                    yield f"group {scored.group.task.group_id}: reward {verdict.reward}, not {expected}: {verdict.detail}"
