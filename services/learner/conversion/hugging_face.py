"""Hugging Face directory of a checkpoint: `millrace weights to-hf`.

ranks' files ─► whole parameters ─► tensors of the model's names and dtypes ─► safetensors files, config, tokenizer, chat template

A critic becomes a sequence classifier with one label: its value of a text is the classifier's logit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from services.common.checkpoints.fingerprint import text_digest
from services.common.checkpoints.manifest import MANIFEST, Checkpoint, read_manifest, verify_files
from services.common.config.settings import Settings
from services.common.errors import ConfigError, ModelError
from services.common.models.directory import ModelInfo, read_json, read_shape, resolve_model
from services.common.models.weight_files import EMBEDDING as HF_EMBEDDING
from services.common.models.weight_files import LM_HEAD, StoredTensor, check_tensors, read_headers
from services.common.spec.learner import BackendName
from services.common.spec.rollout import LoraSpec
from services.learner.conversion.request import Conversion, Converted, RoleName
from services.learner.conversion.sharded import ShardedRole
from services.learner.conversion.skeleton import OUTPUT_LAYER, Skeleton
from services.learner.megatron.parts import merge_parts
from services.learner.megatron.saved import SavedState
from services.learner.training.directory import copy_texts, source_dtypes, write_file, write_shards
from services.learner.training.tensor_file import Weights, dtype_name
from services.learner.training.value_head import HF_NAME as SCORE

CONFIG_DIR = "config"
"""Subdirectory of a checkpoint of weights only, with the model's config and tokenizer."""


def to_hugging_face(request: Conversion, folder: Path) -> Converted:
    """Writes the directory. `folder` exists, and is empty.

    Raises:
        ConfigError: the checkpoint does not have the role, or the directory with its config is not known, or is not the one it was made of.
        CheckpointError: a file is missing, or does not match its digest.
    """
    if not (Path(request.source) / MANIFEST).is_file():
        raise ConfigError(f"CHECKPOINT: {request.source} is no checkpoint: it has no {MANIFEST}")
    checkpoint = read_manifest(Path(request.source))
    verify_files(checkpoint)
    model_dir = _model_dir(request, checkpoint)
    with ExitStack() as stack:
        dtype, role = _open_role(request, checkpoint, model_dir, stack)
        dtypes = _dtypes(request, role, model_dir, dtype)
        plan = {
            name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in role.shapes(dtypes).items()
        }
        files = copy_texts(model_dir, folder, ".", _chat_template(checkpoint)) + write_shards(
            plan, lambda names: role.load(names, dtypes), folder, "."
        )
    check_tensors(folder, *_as_language_model(folder))
    config = _adapt_config(folder, request)
    return Converted(
        path=request.out,
        role=request.role,
        architecture=config["architectures"][0],
        dtype=", ".join(sorted({dtype_name(tensor.dtype) for tensor in plan.values()})),
        tensors=len(plan),
        parameters=sum(tensor.numel() for tensor in plan.values()),
        bytes=sum(file.bytes for file in files),
        step=checkpoint.step,
    )


def _open_role(
    request: Conversion, checkpoint: Checkpoint, model_dir: Path, stack: ExitStack
) -> tuple[torch.dtype, SavedRole | ShardedRole]:
    """The job's dtype, and the role's parameters, from whatever back end saved them."""
    saved = stack.enter_context(SavedState(checkpoint.path))
    dtype = getattr(torch, str(saved.layout["dtype"]))
    if saved.layout.get("backend") == BackendName.FSDP2.value:
        given = checkpoint.state["identity"]["spec"]["model"].get("lora") if request.role is RoleName.ACTOR else None
        lora = None if given is None else LoraSpec.model_validate(given)
        return dtype, ShardedRole(checkpoint.path, request.role, model_dir, lora, stack)
    return dtype, SavedRole(saved, request.role, Skeleton.of(model_dir, dtype))


class SavedRole:
    """A role's parameters in a checkpoint of Megatron's, under their Hugging Face names."""

    def __init__(self, saved: SavedState, role: RoleName, skeleton: Skeleton) -> None:
        """Raises ConfigError when the checkpoint does not have the role."""
        self._saved, self._skeleton = saved, skeleton
        self._is_critic = role is RoleName.CRITIC
        self._places = saved.names(role.prefix)
        if not self._places:
            has = [name.value for name in RoleName if saved.names(name.prefix)]
            raise ConfigError(f"--role {role}: {saved.folder} has none (it has: {', '.join(has)})")
        self._made_of = {name: known for known in self._places for name in self._names_of(known)}
        self._last: tuple[str, Weights] = ("", {})

    @property
    def names(self) -> set[str]:
        """Tensors that it can give; of a tied model without `lm_head.weight`."""
        return set(self._made_of)

    def shapes(self, names: Mapping[str, object]) -> dict[str, torch.Size]:
        """The shapes of these tensors."""
        return {name: self._tensors(self._source(name), on="meta")[self._key(name)].shape for name in names}

    def load(self, names: list[str], dtypes: Mapping[str, torch.dtype]) -> Weights:
        """These tensors, contiguous."""
        return {name: self._cached(self._source(name))[self._key(name)].to(dtypes[name]).contiguous() for name in names}

    def _names_of(self, known: str) -> list[str]:
        """Hugging Face names of a parameter; none for the copy of a tied embedding on the last stage."""
        if known != OUTPUT_LAYER:
            return self._skeleton.hugging_face_names(known)
        return [SCORE] if self._is_critic else [] if self._skeleton.tied else [LM_HEAD]

    def _source(self, name: str) -> str:
        return self._made_of[self._key(name)]

    def _key(self, name: str) -> str:
        return HF_EMBEDDING if name == LM_HEAD and name not in self._made_of else name

    def _cached(self, known: str) -> Weights:
        """The tensors of a parameter; the last one is kept, because a file usually has all of them."""
        if self._last[0] != known:
            self._last = (known, self._tensors(known))
        return self._last[1]

    def _tensors(self, known: str, *, on: str = "cpu") -> Weights:
        place = self._places[known]
        if known == OUTPUT_LAYER and self._is_critic:
            head = self._saved.weight(place)[0]
            return {SCORE: head.to(on)}
        if on == "meta":
            part = self._saved.shape(place)
            whole = torch.empty(self._skeleton.whole_shape(known, part, self._saved.tp_size), device=on)
        else:
            parts = self._saved.weight(place)
            whole = merge_parts(self._skeleton.bridge, known, parts, self._skeleton.parameter(known))
        return self._skeleton.to_hugging_face(known, whole)


def _dtypes(
    request: Conversion, role: SavedRole | ShardedRole, model_dir: Path, saved: torch.dtype
) -> dict[str, torch.dtype]:
    """Dtype of every tensor to be written: that of the model's own files, if it has any, unless one is asked for; in their order."""
    own = source_dtypes(model_dir)
    available = role.names if request.role is RoleName.CRITIC else role.names | {LM_HEAD}
    names = [*(name for name in own if name in available), *sorted(role.names - own.keys())]
    if request.dtype is not None:
        return dict.fromkeys(names, getattr(torch, request.dtype))
    return {name: own.get(name, own.get(HF_EMBEDDING, saved)) for name in names}


def _as_language_model(folder: Path) -> tuple[dict[str, StoredTensor], ModelInfo, dict[str, Any]]:
    """Tensors and config of the directory just written; a critic's without its head, as if the embedding were in its place."""
    headers, config, shape = read_headers(folder), read_json(folder / "config.json"), read_shape(folder / "config.json")
    if headers.pop(SCORE, None) is not None:
        shape = replace(shape, tie_word_embeddings=True)
    return headers, shape, config


def _adapt_config(folder: Path, request: Conversion) -> dict[str, Any]:
    """The written config.json, once it names the dtype that was asked for, and of a critic the classifier."""
    file = folder / "config.json"
    config = read_json(file)
    changes: dict[str, Any] = {}
    if request.dtype is not None:
        changes["torch_dtype" if "torch_dtype" in config else "dtype"] = request.dtype
    if request.role is RoleName.CRITIC:
        (architecture,) = config["architectures"]
        changes |= {
            "architectures": [architecture.replace("ForCausalLM", "ForSequenceClassification")],
            "id2label": {"0": "VALUE"},
            "label2id": {"VALUE": 0},
            "tie_word_embeddings": False,
        }
    if changes:
        write_file(folder, file.name, json.dumps(config | changes, indent=2).encode() + b"\n")
    return config | changes


def _model_dir(request: Conversion, checkpoint: Checkpoint) -> Path:
    """The directory whose config and tokenizer belong to the role."""
    identity = checkpoint.state.get("identity")
    spec = identity.get("spec") if isinstance(identity, dict) else None
    model = spec.get("model") if isinstance(spec, dict) else None
    if not isinstance(identity, dict) or not isinstance(spec, dict) or not isinstance(model, dict):
        raise ConfigError(f"{checkpoint.path}: its manifest does not say what it was made of")
    section = spec.get(request.role) if request.role is not RoleName.ACTOR else None
    own = section.get("path") if isinstance(section, dict) else None
    if request.model is not None:
        found = Path(request.model).absolute()
    elif (checkpoint.path / CONFIG_DIR).is_dir():
        found = checkpoint.path / CONFIG_DIR
    else:
        found = _resolved(str(own or model.get("path")), request)
        if own is None and text_digest(found) != identity.get("tokenizer"):
            raise ConfigError(
                f"{found}: its config or tokenizer is not that of {checkpoint.path}: name its model's directory with --model"
            )
    shape = read_shape(found / "config.json").described()
    different = [name for name, value in shape.items() if own is None and value != identity.get("shape", {}).get(name)]
    if different:
        raise ConfigError(f"{found / 'config.json'}: {', '.join(different)} differ from the checkpoint's")
    return found


def _chat_template(checkpoint: Checkpoint) -> str | None:
    """The job's own, if it has one."""
    found = checkpoint.state["identity"]["spec"]["model"].get("chat_template")  # `_model_dir` has checked its form
    return found if isinstance(found, str) else None


def _resolved(path: str, request: Conversion) -> Path:
    try:
        settings = Settings(home=Path(request.home), model_roots=[Path(root) for root in request.model_roots])
        return resolve_model(path, settings)
    except ModelError as error:
        problems = "; ".join(problem.message for problem in error.problems)
        raise ConfigError(f"the checkpoint's model {path!r}: {problems}: name its directory with --model") from error
