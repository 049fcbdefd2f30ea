"""Models that would be trained wrongly are refused, by the key of their config.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from services.common.errors import ModelError
from services.learner.megatron.bridges import check_model, rope_arguments
from services.learner.training.layout import Layout

SIZES = {
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "vocab_size": 132,
    "head_dim": 8,
}


def layout(tp_size: int = 1, pp_size: int = 1) -> Layout:
    return Layout(rank=0, tp_size=tp_size, tp_rank=0, pp_size=pp_size, pp_rank=0, dp_size=1, dp_rank=0)


@pytest.mark.parametrize(
    ("change", "place", "message"),
    [
        ({"attention_bias": True}, layout(), "attention_bias = True is not supported"),
        ({"mlp_bias": True}, layout(), "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, layout(), "hidden_act = 'gelu' is not supported"),
        ({}, layout(tp_size=2), "num_attention_heads = 9 is not divisible by tensor_parallel_size = 2"),
        ({}, layout(pp_size=2), "num_hidden_layers = 3 is not divisible by pipeline_parallel_size = 2"),
    ],
)
def test_what_does_not_fit_names_its_key(change: dict[str, Any], place: Layout, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_model(LlamaConfig(**(SIZES | change)), Path("model"), place)


def test_a_plain_llama_passes() -> None:
    check_model(LlamaConfig(**SIZES), Path("model"), layout(tp_size=3, pp_size=3))


def test_a_sliding_window_is_refused() -> None:
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16)
    with pytest.raises(ModelError, match="use_sliding_window = True"):
        check_model(config, Path("model"), layout())


def test_the_rotary_base_is_found_where_transformers_keeps_it() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 77_000.0})
    assert rope_arguments(config) == {"rotary_base": 77_000.0}


def test_a_scaling_that_megatron_lacks_is_refused() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelError, match="rope_type = 'dynamic' is not supported"):
        rope_arguments(config)


def test_no_model_of_mbridge_is_imported_but_those_that_are_used() -> None:
    """Some of the others cannot be imported with every Megatron-core."""
    models = {name.split(".")[2] for name in sys.modules if name.startswith("mbridge.models.")}
    assert models == {"llama", "qwen2", "qwen3"}
