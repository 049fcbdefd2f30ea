"""The job spec: what a person sends to `POST /jobs` and writes in a YAML file. The same model serves both."""

from services.common.spec.algorithm import (
    RECORDED,
    AdvantageEstimator,
    AlgorithmSpec,
    FilterMetric,
    ImportanceCorrection,
    KlEstimator,
    LossName,
)
from services.common.spec.data import DataSourceSpec, DataSpec
from services.common.spec.job import JobSpec, dump_spec, parse_recorded_spec, parse_spec
from services.common.spec.learner import CheckpointSpec, EvalSpec, LearnerSpec, OffPolicySpec
from services.common.spec.rollout import DType, ModelSpec, RewardSpec, RolloutSpec

__all__ = [
    "RECORDED",
    "AdvantageEstimator",
    "AlgorithmSpec",
    "CheckpointSpec",
    "DType",
    "DataSourceSpec",
    "DataSpec",
    "EvalSpec",
    "FilterMetric",
    "ImportanceCorrection",
    "JobSpec",
    "KlEstimator",
    "LearnerSpec",
    "LossName",
    "ModelSpec",
    "OffPolicySpec",
    "RewardSpec",
    "RolloutSpec",
    "dump_spec",
    "parse_recorded_spec",
    "parse_spec",
]
