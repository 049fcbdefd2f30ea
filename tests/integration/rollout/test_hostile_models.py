"""A model that the engine cannot run, through the real service and real vLLM: the job has the engine's own last line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from services.common.jobs import deaths
from services.common.jobs.store import JobStore
from services.common.redis import keys
from tests.integration.rollout.conftest import VOCAB, snapshot, write_model
from tests.integration.rollout.test_service import Service, World, a_task, gone, start, wait_until, world

__all__ = ["start", "world"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.parametrize("redis_url", ["embedded"], indirect=True),
]


@pytest.fixture(scope="session")
def narrow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with heads of 16, which vLLM's CPU kernels do not take; they say so at the first token."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model") / "narrow"
    write_model(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


async def test_a_model_that_the_engine_cannot_run_is_a_failed_start_with_the_engines_own_last_line(
    world: World, start: Callable[[], Service], narrow_model: Path
) -> None:
    job = replace(world.job, model_path=str(narrow_model))
    tensors = load_file(narrow_model / "model.safetensors")
    world.publisher.publish(snapshot(1, 0, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    await world.ask(a_task(job.job_id, 0))
    service = start()
    await wait_until("health", lambda: "health on port" in service.log(), service)
    await JobStore(world.redis).activate(job)
    engine: set[psutil.Process] = set()
    async with asyncio.timeout(500):
        while not (counted := await deaths.deaths(world.redis, job.job_id)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                engine.update(child for child in service.descendants() if "VLLM" in child.name())
            await asyncio.sleep(0.2)
    (death,) = counted
    assert death.loading, "no token has ever come"
    assert "head_dim=16" in death.cause
    assert "\n" not in death.cause
    assert await world.redis.hgetall(keys.serving(service.name)) == {}
    assert engine
    assert await gone(list(engine), 10) == []
    assert service.process.poll() is None, "it goes on, for jobs that it can serve"
    lines = [json.loads(line) for line in service.whole_log().splitlines() if line.startswith("{")]
    about = [line for line in lines if line["logger"].endswith("engine.output") and "head_dim=16" in line["message"]]
    assert about
    assert {line["job_id"] for line in about} == {job.job_id}, "`millrace logs JOB` shows them"
