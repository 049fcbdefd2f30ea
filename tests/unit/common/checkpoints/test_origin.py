"""What `checkpoint.load` names is looked at before a job is taken in."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.checkpoints.fingerprint import identity_of
from services.common.checkpoints.manifest import CHECKPOINTS_DIR, MANIFEST, WrittenFile, digest_of_file, dump_manifest
from services.common.checkpoints.origin import OriginFacts, check_new_origin
from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.common.jobs.folder import SPEC_FILE
from services.common.models.directory import ModelInfo
from services.common.models.weight_files import needed_tensors
from services.common.spec.job import JobSpec
from services.learner.storage.checkpoints import CheckpointStore
from tests.unit.small_models import LLAMA

INFO = ModelInfo("LlamaForCausalLM", 2, 4, 2, 32, 48, 64, 256, tie_word_embeddings=True)
DATASET = "d" * 32
JOB = "earlier-00000001"
Change = Callable[[Settings], object]


def make_model(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    weights = {name: np.zeros(shape, np.float32) for name, shape in needed_tensors(INFO, LLAMA)}
    save_file(weights, folder / "model.safetensors")
    return folder


def spec(load: str | None = JOB, how: dict[str, Any] | None = None, **learner: Any) -> JobSpec:
    return JobSpec.model_validate({
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "learner": learner,
        "checkpoint": {"load": load} | (how or {}),
    })  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A home with a model, and a job of it that has a checkpoint of step 10, exported."""
    made = Settings(home=tmp_path / "home", model_roots=[tmp_path / "root"])
    model = make_model(made.models_dir / "tiny")
    make_model(tmp_path / "root" / "other")
    store = CheckpointStore(made.job_dir(JOB) / CHECKPOINTS_DIR, keep=2)
    folder = store.begin(10)
    (folder / "rank-00000.safetensors").write_bytes(b"x" * 1000)
    export = make_model(folder / "hf")
    names = ["rank-00000.safetensors", *(f"hf/{file.name}" for file in sorted(export.iterdir()))]
    files = [WrittenFile(name, (folder / name).stat().st_size, digest_of_file(folder / name)) for name in names]
    identity = identity_of(JOB, spec(None, steps=10), model, DATASET)
    store.commit(10, {"identity": identity.state(), "names_places": True}, files)
    (made.job_dir(JOB) / SPEC_FILE).write_text("")
    return made


def tried(settings: Settings, asked: JobSpec, dataset: str = DATASET) -> OriginFacts | None:
    return check_new_origin(asked, settings, settings.models_dir / "tiny", dataset, time.monotonic() + 20)


def checkpoint(settings: Settings) -> Path:
    return settings.job_dir(JOB) / CHECKPOINTS_DIR / "step-00000010"


def rewrite(change: Callable[[dict[str, Any]], object]) -> Change:
    """The manifest with something changed, under a checksum that is right."""

    def apply(settings: Settings) -> None:
        path = checkpoint(settings) / MANIFEST
        document = json.loads(path.read_bytes())
        document.pop("xxh3")
        change(document)
        path.write_bytes(dump_manifest(document))

    return apply


def test_a_job_a_checkpoint_and_a_model_can_be_named(settings: Settings) -> None:
    assert tried(settings, spec(None)) is None
    here = {"path": str(checkpoint(settings)), "step": 10}
    assert tried(settings, spec()) == here
    assert tried(settings, spec(f"{JOB}/{CHECKPOINTS_DIR}/step-00000010")) == here
    assert tried(settings, spec(), dataset="") == here  # not known yet
    other = str(settings.model_roots[0] / "other")
    assert tried(settings, spec(other)) == tried(settings, spec("other")) == {"path": other, "step": None}


OTHER_LAYOUT: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 2, "use_distributed_optimizer": True}


@pytest.mark.parametrize("how", [{}, {"no_load_optim": True}, {"no_load_rng": True}, {"finetune": True}])
def test_other_ranks_begin_with_the_checkpoint_itself(settings: Settings, how: dict[str, Any]) -> None:
    assert tried(settings, spec(how=how, **OTHER_LAYOUT)) == {"path": str(checkpoint(settings)), "step": 10}


@pytest.mark.parametrize("how", [{"no_load_optim": True}, {"finetune": True}])
def test_other_ranks_take_the_weights_of_a_checkpoint_of_an_earlier_release(
    settings: Settings, how: dict[str, Any]
) -> None:
    rewrite(lambda manifest: manifest["state"].pop("names_places"))(settings)
    assert tried(settings, spec(how=how, **OTHER_LAYOUT)) == {"path": str(checkpoint(settings)), "step": 10}
    assert tried(settings, spec()) == {"path": str(checkpoint(settings)), "step": 10}


def test_other_ranks_cannot_take_the_optimizer_of_an_earlier_release(settings: Settings) -> None:
    rewrite(lambda manifest: manifest["state"].pop("names_places"))(settings)
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: .*learner\.tensor_parallel_size is 1 there and 2 here"):
        tried(settings, spec(**OTHER_LAYOUT))


def test_a_size_that_an_earlier_release_did_not_know_is_its_default_there(settings: Settings) -> None:
    def of_an_earlier_release(manifest: dict[str, Any]) -> None:
        manifest["state"].pop("names_places")
        for size in ("context_parallel_size", "expert_parallel_size"):
            manifest["state"]["identity"]["spec"]["learner"].pop(size, None)

    rewrite(of_an_earlier_release)(settings)
    assert tried(settings, spec()) == {"path": str(checkpoint(settings)), "step": 10}
    with pytest.raises(ConfigError, match=r"learner\.context_parallel_size is 1 there and 2 here"):
        tried(settings, spec(context_parallel_size=2))


def test_a_checkpoint_of_weights_only_gives_neither_step_nor_data_position(settings: Settings) -> None:
    rewrite(lambda manifest: manifest["state"].update(weights_only=True))(settings)
    rewrite(lambda manifest: manifest["state"]["identity"].update(dataset="", tokenizer=""))(settings)
    assert tried(settings, spec(steps=5, **OTHER_LAYOUT)) == {"path": str(checkpoint(settings)), "step": None}


def test_another_dtype_is_taken_with_the_weights_only(settings: Settings) -> None:
    asked = spec().model_dump() | {"model": {"path": "tiny", "dtype": "bfloat16"}}
    with pytest.raises(ConfigError, match=r"model\.dtype is float32 there and bfloat16 here"):
        tried(settings, JobSpec.model_validate(asked))
    asked["checkpoint"]["finetune"] = True
    assert tried(settings, JobSpec.model_validate(asked)) == {"path": str(checkpoint(settings)), "step": 10}


@pytest.mark.parametrize(
    ("asked", "dataset", "words"),
    [
        (spec("nobody-00000000"), DATASET, "nobody-00000000 is not there"),
        (spec("../../etc"), DATASET, "must not contain `..`"),
        (spec("/etc"), DATASET, "leads outside the allowed directories"),
        (spec("x\0y"), DATASET, "NUL"),
        (spec("x" * 1000), DATASET, "is not a usable path: File name too long"),
        (spec("empty-00000001"), DATASET, "has no whole checkpoint yet"),
        (spec("nothing"), DATASET, "neither a checkpoint of a job nor a Hugging Face model directory"),
        (spec(), "e" * 32, "dataset differs"),
        (spec(steps=10), DATASET, "it is at step 10, and learner.steps is 10"),
        (spec("small"), DATASET, "hidden_size differ from the model's"),
        (spec("pickled"), DATASET, "pickled files can run code"),
        (spec("broken"), DATASET, "is no safetensors file"),
    ],
)
def test_what_cannot_be_begun_with_names_the_field(
    settings: Settings, asked: JobSpec, dataset: str, words: str
) -> None:
    folder = settings.job_dir("empty-00000001")
    folder.mkdir()
    (folder / SPEC_FILE).write_text("")
    (settings.models_dir / "nothing").mkdir()
    make_model(settings.models_dir / "small", hidden_size=16)
    (make_model(settings.models_dir / "pickled") / "pytorch_model.bin").write_text("")
    (make_model(settings.models_dir / "broken") / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: ") as caught:
        tried(settings, asked, dataset)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda settings: (checkpoint(settings) / "rank-00000.safetensors").write_bytes(b""),
            "missing, or not 1000 bytes long",
        ),
        (lambda settings: (checkpoint(settings) / MANIFEST).write_text("{"), "has no whole checkpoint yet"),
        (rewrite(lambda manifest: manifest["state"].pop("identity")), "does not say what it was made of"),
        (rewrite(lambda manifest: manifest["state"].update(identity=[1])), "does not say what it was made of"),
        (
            rewrite(lambda manifest: manifest["state"]["identity"].update(spec={"learner": 3})),
            "does not say what it was made of",
        ),
        (rewrite(lambda manifest: manifest["state"]["identity"].pop("tokenizer")), "tokenizer differs"),
        (rewrite(lambda manifest: manifest["state"]["identity"]["shape"].update(num_layers=9)), "num_layers differ"),
        (
            rewrite(lambda manifest: manifest["files"].update({"../x": {"bytes": 1, "xxh3": "0"}})),
            "has no whole checkpoint yet",
        ),
        (rewrite(lambda manifest: manifest.update(format=99)), "format 99 is not known"),
    ],
)
def test_a_checkpoint_that_is_not_whole_names_the_field(settings: Settings, change: Change, words: str) -> None:
    change(settings)
    with pytest.raises(ConfigError, match=r"^checkpoint\.load: ") as caught:
        tried(settings, spec())
    assert words in str(caught.value)


def test_the_facts_are_message_pack_values(settings: Settings) -> None:
    facts = tried(settings, spec())
    assert json.loads(json.dumps(facts)) == facts


def test_roles_that_a_checkpoint_does_not_have_are_no_difference_they_begin_anew(settings: Settings) -> None:
    roles: dict[str, Any] = {"algorithm": {"preset": "ppo"}, "critic": {}, "reference": {}}
    asked = JobSpec.model_validate(spec().model_dump() | roles)
    assert tried(settings, asked) == {"path": str(checkpoint(settings)), "step": 10}
    rewrite(lambda manifest: manifest["state"]["identity"]["spec"].update(critic={"path": None}))(settings)
    assert tried(settings, spec()) == {"path": str(checkpoint(settings)), "step": 10}
