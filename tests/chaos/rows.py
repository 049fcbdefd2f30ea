"""The table of docs/reliability.md: which faults, how many, and the command of each row."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.faults import PROGRESS_P95_S
from tests.chaos.freeze import NOTICED_S
from tests.chaos.stack import TARGETS


@dataclass(frozen=True, slots=True)
class Row:
    """One row."""

    what: str
    holds: str
    """What must hold."""
    fault: str
    target: str = ""
    count: int = 1
    ranks: int = 1
    hold_s: float | None = None
    """None leaves the default, 0 means for ever."""
    real: bool = False
    """With a real engine and real ranks."""
    progress_p95_s: float | None = None
    """What the 95th percentile of the times to progress should stay below."""
    why_late: str = ""
    """Why it does not, on the machine of the record."""

    @property
    def arguments(self) -> list[str]:
        """Of `python -m tests.chaos.run`."""
        words = ["--fault", self.fault]
        words += ["--target", self.target] if self.target else []
        words += ["--count", str(self.count), "--seed", "1"]
        words += ["--ranks", str(self.ranks)] if self.ranks > 1 else []
        words += ["--real"] if self.real else []
        return words + (["--hold", f"{self.hold_s:g}"] if self.hold_s is not None else [])

    @property
    def command(self) -> str:
        """As people type it."""
        return f"python -m tests.chaos.run {' '.join(self.arguments)}"


_ONCE = "*once*"
"""What the oracle and the watcher see to; the document says what it stands for."""
_BY_ITSELF = f"{_ONCE}; goes on by itself, p95 ≤ {PROGRESS_P95_S:g} s"
_NOTICED = f"{_ONCE}; noticed and killed within {NOTICED_S:g} s: two heartbeats, and a second to look"
_PLACES = "no place held beyond its limit + 0.5 s"
"""At the environment service, of an episode at its rollout server, and of a group in the engine."""
_SAYS = "at each time the job says that there is no space, waits, and goes on when there is; 0 lost"

ROWS = (
    *(
        Row(f"kill -9 of {target}", _BY_ITSELF, "kill", target, 100, progress_p95_s=PROGRESS_P95_S)
        for target in TARGETS
    ),
    Row(
        "kill -9 of one of two learner ranks", _BY_ITSELF, "kill", "rank", 100, ranks=2, progress_p95_s=PROGRESS_P95_S,
        why_late="both ranks start anew, each with 3.5 s of imports on the two cores that all services share",
    ),
    Row("kill -9 of everything at once, supervisor included, then `millrace up`", _ONCE, "power-cut", "", 20),
    Row("every fail point between two side effects × kill", _ONCE, "points", "", 2),
    Row("learner killed while a job ends", "the job has ended, servers let it go, the next one runs", "ends", "", 5),
    Row("Redis: restarted", _ONCE, "redis-restart", "", 20),
    Row("Redis: emptied", _ONCE, "redis-flush", "", 5),
    Row(
        "replies of Redis cut", f"{_ONCE}; each step once in the history; no wait beyond twice its deadline",
        "network", "cut", 10_000,
    ),
    Row(
        "500 ms between the services and Redis", f"{_ONCE}; no wait beyond twice its deadline", "network", "latency", 10
    ),
    Row(
        "half-open connections to Redis for 30 s", f"{_ONCE}; no wait beyond twice its deadline", "network", "half-open",
        10, hold_s=30,
    ),
    Row(
        "malformed, oversized and mutated entries beside good ones",
        "no crash, each a dead letter with a reason, throughput ≥ 90 %, memory bounded", "garbage", "", 100_000,
    ),
    Row(
        "learner killed while it saves a checkpoint", f"{_ONCE}; every resume is from a verified checkpoint", "saves", "", 200
    ),
    Row("flipped bits in checkpoint and journal", "all noticed, the one before taken", "flips", "", 1000),
    Row("cut ends of checkpoint and journal", "nothing believed that was not written", "cut-ends", "", 1000),
    Row("weight chunks flipped, dropped, reordered, repeated, cut", "nothing wrong is ever staged", "chunks", "", 10_000),
    Row("the same, while a job runs", f"{_ONCE}; 0 tokens from weights that were not verified", "chunks", "job", 1000),
    Row(
        "a process that judges a part of a rubric killed, or stopped", f"{_ONCE}; no reward of half a rubric", "rubric", "",
        20,
    ),
    Row("verifier bombs, 16 at once", "no slot lost beyond its limit + 0.5 s, good answers unaffected", "bombs", "", 1000),
    Row(
        "a judge's endpoint that stalls, drops, refuses; a reward model's process killed and stopped",
        f"{_ONCE}; no place held beyond its limit + 0.5 s; every trained reward is what all said", "models", "", 7,
    ),
    *(
        Row(f"{signal} of {what} in mid-turn of episodes", f"{_ONCE}, each episode played again; {_PLACES}", fault, target, count)
        for fault, signal, of_one, of_many in (("episode-kill", "kill -9", 60, 300), ("episode-stop", "SIGSTOP", 40, 200))
        for target, what, count in (
            ("world", "an environment's process", of_many), ("environment", "the environment service", of_one),
            ("rollout", "a rollout server", of_one),
        )
    ),
    Row(
        "hostile environments: bombs of memory and processes, endless steps, 100 MB at once, two answers, nonsense",
        f"{_ONCE}; none of it is ever a reward; each deed fails its episode; {_PLACES}", "hostile-worlds", "", 1000,
    ),
    *(
        Row(f"SIGSTOP of {target} {how}", _NOTICED, "freeze", target, 10, hold_s=hold_s)
        for hold_s, how in ((30, "for 30 s"), (0, "for ever"))
        for target in TARGETS
    ),
    *(
        Row(
            f"{target} stopped at each of its fail points, replaced, and woken", f"{_ONCE}; it writes nothing, and ends",
            "wake", target, count,
        )
        for target, count in (("rank", 1), ("rollout", 2), ("reward", 5))
    ),
    Row("disk full below journal and checkpoints", _SAYS, "full", "jobs", 5),
    Row("disk full below Redis", _SAYS, "full", "redis", 5),
    Row(
        "stop at step k, resume; real Megatron: alone, TP, PP, DP = 2",
        "the same groups at each step, bitwise equal weights", "resume", "", 20,
    ),
    Row("wall clock of each service ± 1 h", _ONCE, "clock", "", 2),
    Row("two faults at once: random pairs of these, within two seconds of each other", _ONCE, "pairs", "", 200),
    Row(
        "hostile jobs beside a good one: bad specs, models, data, verifiers, bodies",
        "each is refused, or ends with a cause, within its limit; the good one keeps 90 % of its pace, *once*; nothing is started again",
        "hostile", "", 200,
    ),
    Row(
        "the same with bad models, real vLLM and Megatron", "as above", "hostile", "", 10, real=True,
    ),
)  # fmt: skip
