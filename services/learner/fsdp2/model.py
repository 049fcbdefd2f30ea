"""Models of this rank: transformers' own, whose weights are sharded over the data-parallel ranks.

micro-batch: a row of segments ─► transformers' layers, our attention ─► output only where a response token is predicted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from services.common.errors import ModelError
from services.common.models.weight_files import LM_HEAD
from services.common.spec.learner import Recompute
from services.common.spec.rollout import LoraSpec
from services.learner.fsdp2 import adapters, attention
from services.learner.fsdp2.optimizer import Optimizer
from services.learner.fsdp2.sharding import Shards
from services.learner.training.backend import AdapterFiles, OnOutput
from services.learner.training.batch import MicroBatch
from services.learner.training.layout import Layout
from services.learner.training.tensor_file import Weights
from services.learner.training.value_head import ValueHead

VALUE_HEAD = "value_head."
_ATTENTIONS = {"full_attention", "sliding_attention"}
"""Kinds of layers in config.json that `attention` computes."""
_DROPOUT = ("dropout", "pdrop", "dropout_rate", "dropout_prob")


class ValueModel(torch.nn.Module):
    """A causal model with a scalar head in place of its output layer; its parameters keep their names in the causal model."""

    def __init__(self, causal: Any) -> None:  # noqa: ANN401  transformers comes without types
        super().__init__()
        self.add_module(causal.base_model_prefix, causal.base_model)
        self._prefix = causal.base_model_prefix
        self.value_head = ValueHead(causal.config.get_text_config().hidden_size)

    def forward(self, *, logits_to_keep: torch.Tensor, **inputs: Any) -> torch.Tensor:  # noqa: ANN401  transformers' own
        """[1, R, 1] values of these positions."""
        hidden = self.get_submodule(self._prefix)(**inputs).last_hidden_state
        values: torch.Tensor = self.value_head(hidden[:, logits_to_keep])[0]
        return values


class PolicyModel(torch.nn.Module):
    """A causal model, whose output is the logits."""

    def __init__(self, causal: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.causal = causal

    def forward(self, **inputs: Any) -> torch.Tensor:  # noqa: ANN401
        """[1, R, V] logits of the positions `logits_to_keep`."""
        logits: torch.Tensor = self.causal(**inputs).logits
        return logits


class Float32Output(torch.nn.Linear):
    """An output layer that computes in float32, from its rounded input and weight."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, h] → […, V]."""
        return linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def read_config(model_dir: Path) -> Any:  # noqa: ANN401  transformers comes without types
    """What transformers makes of config.json, without dropout. Raises ModelError for a model that it does not know."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir}: {error}") from error
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if name.endswith(_DROPOUT) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def build(model_dir: Path, dtype: torch.dtype, *, fp32_output_layer: bool, recompute: Recompute) -> Any:  # noqa: ANN401
    """Transformers' causal model on the CPU, without weights yet; ModelError if it cannot be trained here."""
    attention.register()
    config = read_config(model_dir)
    try:
        with no_init_weights():
            causal = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelError(f"{model_dir}: {error}") from error
    _check_attention(causal, model_dir)
    causal.tie_weights()
    if fp32_output_layer:
        causal.get_output_embeddings().__class__ = Float32Output
    causal.train()
    _recompute(causal, recompute)
    return causal


def _check_attention(causal: Any, model_dir: Path) -> None:  # noqa: ANN401
    """Raises ModelError where positions of a row would see what is not theirs: only our attention keeps its sequences apart."""
    kind, layers = causal.config.model_type, set(getattr(causal.config, "layer_types", None) or ())
    if not causal._supports_attention_backend or causal._is_stateful:  # noqa: SLF001  nothing public says it
        raise ModelError(
            f"{model_dir}: model_type {kind!r} does not take another attention: backend fsdp2 cannot train it"
        )
    if others := sorted(layers - _ATTENTIONS):
        raise ModelError(
            f"{model_dir}: layer_types has {others[0]!r}: backend fsdp2 trains {' and '.join(sorted(_ATTENTIONS))} only"
        )


def layers_of(causal: Any) -> list[torch.nn.Module]:  # noqa: ANN401
    """The decoder's layers."""
    kinds = set(causal._no_split_modules or ())  # noqa: SLF001  as transformers and accelerate find them
    return [module for module in causal.modules() if type(module).__name__ in kinds]


def _recompute(causal: Any, recompute: Recompute) -> None:  # noqa: ANN401
    match recompute:
        case Recompute.NONE:
            pass
        case Recompute.FULL:
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        case Recompute.SELECTIVE:
            for layer in layers_of(causal):
                mlp = getattr(layer, "mlp", None)
                if mlp is not None:
                    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)


class FSDP2Model:
    """This rank's part of the model of one role; `training.backend.Model` describes the methods."""

    def __init__(
        self, root: torch.nn.Module, names: Callable[[str], str], tied_to: str | None, shards: Shards, layout: Layout, device: torch.device,
        dtype: torch.dtype, lora: LoraSpec | None,
    ) -> None:  # fmt: skip
        """`names`: a parameter's name in a Hugging Face directory; `tied_to`: that of the embedding, where it is the output layer too."""
        self._root, self._shards, self._layout, self._device, self._dtype = root, shards, layout, device, dtype
        self._tied_to = tied_to
        self.sharded: dict[str, DTensor] = {}
        for name, parameter in root.named_parameters():
            if not isinstance(parameter, DTensor):
                raise TypeError(f"{name} is not sharded")
            self.sharded[adapters.plain_name(names(name))] = parameter
        self._lora = lora
        self._adapted = {
            adapters.base_of(name): name.removesuffix(adapters.A) for name in self.sharded if name.endswith(adapters.A)
        }
        self.has_initial_base = True
        """Whether the weights that are not trained are still those of the model's directory."""
        self.own: Optimizer | None = None

    @property
    def optimizer(self) -> Optimizer:
        """AdamW."""
        if self.own is None:
            raise ValueError("the model is not trained")
        return self.own

    def figures(self) -> dict[str, float]:
        """Has none."""
        return {}

    def parameters(self) -> Iterable[torch.Tensor]:
        """This rank's rows."""
        return (parameter.to_local() for parameter in self.sharded.values())

    def run(self, micro_batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> None:
        """Row by row; the ranks sum their gradients after the last one."""
        assert isinstance(self._root, FSDPModule)  # noqa: S101
        tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        for place, micro_batch in enumerate(micro_batches, 1):
            self._root.set_requires_gradient_sync(place == len(micro_batches))
            with torch.set_grad_enabled(not forward_only):
                loss, count = on_output(micro_batch, self._forward(micro_batch)[0])
            tokens += count
            if not forward_only:
                loss.backward()  # type: ignore[no-untyped-call]
        if forward_only:
            self._root.reshard()  # the root stays gathered after a forward pass: it would not see the next step's weights
            return
        if dist.get_world_size() > 1:
            dist.all_reduce(tokens)
        divisor = max(1, int(tokens))
        for parameter in self.sharded.values():
            if parameter.grad is not None:
                parameter.grad.to_local().div_(divisor)  # type: ignore[attr-defined]

    @property
    def trained(self) -> dict[str, DTensor]:
        """Those of the parameters that the optimizer changes."""
        return {name: parameter for name, parameter in self.sharded.items() if parameter.requires_grad}

    @property
    def loaded(self) -> dict[str, DTensor]:
        """Those that a model's directory has: neither adapters nor a value head."""
        return {
            name: p
            for name, p in self.sharded.items()
            if not (adapters.is_adapter(name) or name.startswith(VALUE_HEAD))
        }

    @torch.no_grad()
    def rows(self, name: str) -> torch.Tensor:
        """This rank's rows of a weight, its adapter merged."""
        own = self.sharded[name].to_local()
        adapted = self._adapted.get(name)
        if adapted is None or self._lora is None:
            return own
        a, b = self.sharded[f"{adapted}{adapters.A}"], self.sharded[f"{adapted}{adapters.B}"]
        merged = torch.addmm(own.float(), b.to_local(), a.full_tensor(), alpha=adapters.scale_of(self._lora))
        return merged.to(own.dtype)

    def own_weights(self) -> Weights:
        """This rank's rows, with adapters merged."""
        return {name: self.rows(name) for name in self.loaded}

    @torch.no_grad()
    def take_weights(self, weights: Weights) -> None:
        """Row by row."""
        for name, parameter in self.loaded.items():
            parameter.to_local().copy_(weights[name])
        self.has_initial_base = False

    def load_weights(self, model_dir: Path) -> None:
        """Reads this rank's rows of the safetensors files."""
        with ExitStack() as stack, torch.no_grad():
            files = [
                stack.enter_context(safe_open(path, framework="pt")) for path in sorted(model_dir.glob("*.safetensors"))
            ]
            home = {name: file for file in files for name in file.keys()}  # noqa: SIM118  it is no dict
            for name, parameter in self.loaded.items():
                if name not in home:
                    what = (
                        "mixtures of experts are not trained by backend fsdp2"
                        if ".experts." in name
                        else f"{name} is missing"
                    )
                    raise ModelError(f"{model_dir}: its weights do not fit its config.json: {what}")
                stored = home[name].get_slice(name)
                if list(stored.get_shape()) != list(parameter.shape):
                    shapes = f"{list(stored.get_shape())}, and not {list(parameter.shape)}"
                    raise ModelError(
                        f"{model_dir}: its weights do not fit its config.json: {name} has the shape {shapes}"
                    )
                parameter.to_local().copy_(stored[self._shards.rows(parameter.shape[0])])
        self.has_initial_base = False

    def gather(self, dtype: torch.dtype | None, *, copy: bool = True) -> Weights | None:
        """Parameter by parameter over the ranks that share a copy."""
        weights: Weights = {}
        for name, parameter in self.sharded.items():
            if adapters.is_adapter(name):
                continue
            whole = self._whole(parameter, self.rows(name).to(dtype or self._dtype))
            if self._layout.rank == 0:
                weights[name] = whole.to("cpu", copy=copy).contiguous()
        if self._layout.rank != 0:
            return None
        if self._tied_to is not None:
            weights[LM_HEAD] = weights[self._tied_to].clone() if copy else weights[self._tied_to]
        return weights

    def adapter(self, base_model: str) -> AdapterFiles | None:
        """In float32."""
        if self._lora is None:
            return None
        whole = {name: p.full_tensor().detach().cpu() for name, p in self.sharded.items() if adapters.is_adapter(name)}
        if self._layout.rank != 0:
            return None
        return AdapterFiles(*adapters.peft_files(self._lora, whole, base_model))

    def _whole(self, parameter: DTensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks that share the copy."""
        sharded = DTensor.from_local(
            rows,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return sharded.full_tensor()

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        """[1, R, …]."""
        position_ids = None if batch.position_ids is None else batch.position_ids[None]
        output: torch.Tensor = self._root(
            input_ids=batch.tokens,
            position_ids=position_ids,
            segments=None if batch.attention is None else batch.attention.numpy().tobytes(),
            logits_to_keep=batch.positions,
            use_cache=False,
        )
        return output
