"""Models that judge: the judges and reward models of all jobs, and what they share on one server.

job's section `reward` ──► judges ──► endpoints (keys, places, cache)
                       └─► reward models ──► processes (one forkserver)
"""

from __future__ import annotations

from weakref import WeakSet

from services.common.config.settings import Settings
from services.common.sandbox.limits import MIB
from services.common.sandbox.pool import Sandbox
from services.common.spec.reward import RewardSpec
from services.reward import metrics
from services.reward.judge.endpoints import Endpoints
from services.reward.judge.judge import Judge
from services.reward.reward_model.process import PREPARE
from services.reward.reward_model.reward_model import RewardModel
from services.reward.scorers.base import NamedScorer


class Models:
    """Maker of judges and reward models."""

    def __init__(self, settings: Settings) -> None:
        """Reads the endpoints' keys; starts nothing. Raises ConfigError when a key cannot be had."""
        self._settings = settings
        self._endpoints = Endpoints(settings.judge_endpoints)
        self._sandbox = Sandbox(prepare=[PREPARE], service="reward-model", log_level=settings.log_level)
        self._reward_models: WeakSet[RewardModel] = WeakSet()

    async def close(self) -> None:
        """Ends connections and processes, after the jobs' own judges and reward models have been closed."""
        await self._endpoints.close()
        await self._sandbox.stop()

    def of(self, spec: RewardSpec) -> dict[str, NamedScorer]:
        """A job's judges and reward models by name, not yet opened."""
        chars, count = spec.max_chars, len(spec.reward_models)
        judges = {name: Judge(name, judge, self._endpoints, max_chars=chars) for name, judge in spec.judges.items()}
        reward_models = {
            name: RewardModel(name, model, self._settings, self._sandbox, max_chars=chars, of=count)
            for name, model in spec.reward_models.items()
        }
        self._reward_models.update(reward_models.values())
        return {**judges, **reward_models}

    def status(self) -> dict[str, str | int | float]:
        """For the list of workers: reward models with a process, how many load, and their memory; empty without any."""
        sizes = [model.resident_bytes for model in self._reward_models]
        loading = sum(model.loading for model in self._reward_models)
        metrics.MODEL_BYTES.set(sum(sizes))
        if not any(sizes) and not loading:
            return {}
        return {
            "reward_models": sum(size > 0 for size in sizes),
            "reward_models_loading": loading,
            "reward_models_mib": sum(sizes) // MIB,
        }
