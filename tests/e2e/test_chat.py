"""The `openai` client, `millrace chat` and a live stack: a running job's policy, then the checkpoint that it left."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionUserMessageParam

from examples.demo.charlm_tokenizer import QUESTION
from millrace.connection import find_token
from tests.e2e.conftest import ROOT, Stack
from tests.e2e.test_loop import check_accounting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test also makes the model and starts the stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    token = find_token(stack.state.token_file)
    with openai.OpenAI(base_url=f"{stack.state.url}/v1", api_key=token, max_retries=0, timeout=180) as made:
        yield made


@pytest.fixture(scope="module")
def running(stack: Stack) -> Iterator[str]:
    """A job that trains until it is cancelled."""
    job_id = stack.client.submit(long_job())["id"]
    stack.wait(job_id, until=lambda record: record["step"] >= 2, timeout_s=300)
    yield job_id
    if stack.client.job(job_id)["state"] not in {"succeeded", "failed", "cancelled"}:
        stack.client.cancel(job_id)


def long_job() -> dict[str, Any]:
    import yaml

    from tests.e2e.conftest import MODEL

    spec: dict[str, Any] = yaml.safe_load((ROOT / "deploy/config/jobs/demo.yaml").read_text())
    spec["model"]["path"] = str(MODEL)
    spec["learner"]["steps"] = 5000
    spec["eval"] = {"enabled": False}
    return spec


def was_cancelled(record: dict[str, Any]) -> bool:
    return bool(record["state"] == "cancelled")


def ask(text: str = "2 + 3 + 4") -> list[ChatCompletionUserMessageParam]:
    return [{"role": "user", "content": f"{QUESTION}{text} ="}]


def versions(answer: Any) -> tuple[int, int]:
    told = answer.model_extra["policy_version"]
    return told["min"], told["max"]


def test_a_running_job_answers_with_its_current_policy(stack: Stack, client: openai.OpenAI, running: str) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed[running].owned_by == "millrace"
    assert client.models.retrieve(running).id == running

    before = stack.client.job(running)["policy_version"]
    raw = client.chat.completions.with_raw_response.create(model=running, messages=ask(), max_tokens=8)
    answer = raw.parse()
    after = stack.client.job(running)["policy_version"]
    assert isinstance(answer, ChatCompletion)
    low, high = versions(answer)
    assert before - 1 <= low <= high <= after + 1  # the record is written a moment after the version is announced
    assert low > 0
    assert answer.system_fingerprint == f"{running}@{high}"
    assert raw.headers["x-millrace-policy-version"] in {str(high), f"{low}-{high}"}
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    stack.wait(running, until=lambda record: record["policy_version"] > high + 2, timeout_s=120)
    later = client.chat.completions.create(model=running, messages=ask(), max_tokens=8)
    assert versions(later)[0] > high, "the answer is of a newer policy"


def test_streams_arrive_in_pieces_and_end_with_usage(client: openai.OpenAI, running: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=running, messages=ask(), max_tokens=16, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] in {"stop", "length"}
    assert not any(reasons[:-1])
    assert chunks[-1].usage is not None
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) == len(text), (
        "a character-level policy streams a character at a time"
    )
    assert versions(chunks[-1])[0] > 0

    pieces = list(client.completions.create(model=running, prompt="<|user|>1 + 1 =", max_tokens=4, stream=True))
    assert pieces[-1].choices[0].finish_reason in {"stop", "length"}


def test_four_clients_are_answered_while_the_job_trains(stack: Stack, client: openai.OpenAI, running: str) -> None:
    start = stack.client.job(running)["step"]

    def talk(number: int) -> list[int]:
        found = []
        for turn in range(10):
            answer = client.chat.completions.create(model=running, messages=ask(f"{number} + {turn} + 1"), max_tokens=8)
            found.append(versions(answer)[1])
        return found

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(talk, range(4)):
            assert found == sorted(found), "policy versions only grow"
    stack.wait(running, until=lambda record: record["step"] > start, timeout_s=120)


def test_bad_requests_get_the_clients_own_errors(stack: Stack, client: openai.OpenAI, running: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody-00000000", messages=ask())
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=running, messages=ask("1" * 400))
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model=running, messages=ask(), seed=3)
    assert (tools.value.code, tools.value.param) == ("unsupported_parameter", "seed")
    stranger = openai.OpenAI(base_url=f"{stack.state.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


def test_millrace_chat_says_which_version_spoke(stack: Stack, running: str) -> None:
    done = command(stack, running, "--message", f"{QUESTION}1 + 2 + 3 =", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "(policy version" in done.stderr
    talk = command(stack, running, "--max-tokens", "8", typed=f"{QUESTION}1 + 2 + 3 =\n/quit\n")
    assert talk.returncode == 0, talk.stderr
    assert "(policy version" in talk.stderr
    wrong = command(stack, "nobody-00000000", "--message", "hello")
    assert wrong.returncode == 1
    assert "does not exist" in wrong.stderr


def test_after_the_job_its_checkpoint_answers_until_training_needs_the_server(
    stack: Stack, client: openai.OpenAI, running: str
) -> None:
    stack.client.cancel(running)
    ended = stack.wait(running, until=was_cancelled, timeout_s=120)
    check_accounting(ended)
    assert ended["groups"]["failed"] == ended["groups"]["stale"] == 0, "chats cost training no group"

    stream = client.chat.completions.create(model=running, messages=ask(), max_tokens=8, temperature=0, stream=True)
    chunks = list(stream)  # the connection lives while the checkpoint is loaded
    first = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert versions(chunks[-1]) == (ended["step"], ended["step"])
    started = time.monotonic()
    again = client.chat.completions.create(model=running, messages=ask(), max_tokens=8, temperature=0)
    assert time.monotonic() - started < 5, "it is loaded once"
    assert again.choices[0].message.content == first, "the checkpoint does not change"
    assert running in {model.id for model in client.models.list()}

    second = stack.client.submit(long_job())["id"]
    stack.wait(second, until=lambda record: record["step"] >= 1, timeout_s=300)
    with pytest.raises(openai.InternalServerError) as nobody:
        client.chat.completions.create(model=running, messages=ask(), max_tokens=8)
    assert nobody.value.status_code == 503
    assert nobody.value.code == "model_not_ready"
    assert int(nobody.value.response.headers["retry-after"]) > 0
    answer = client.chat.completions.create(model=second, messages=ask(), max_tokens=8)
    assert answer.model == second
    stack.client.cancel(second)
    stack.wait(second, until=was_cancelled, timeout_s=120)


def command(stack: Stack, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "services.cli.main", "chat", *arguments, "--home", str(stack.home)]
    return subprocess.run(line, cwd=ROOT, input=typed, capture_output=True, text=True, timeout=120, check=False)
