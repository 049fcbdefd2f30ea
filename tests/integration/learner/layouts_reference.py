"""A clean process: makes models that are whole, with tokenizers, for actor, critic and reference. No Megatron here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from examples.demo.charlm_tokenizer import make_tokenizer, save_tokenizer
from tests.integration.learner.layouts_cases import MODELS, VOCABULARY
from tests.integration.learner.trainer_reference import build


def main(root: Path) -> None:
    """Writes a Hugging Face directory per model and role."""
    torch.manual_seed(11)
    for name in MODELS:
        for folder in (name, f"{name}-critic", f"{name}-reference"):
            build(name, vocabulary=VOCABULARY).save_pretrained(root / folder)
            save_tokenizer(make_tokenizer(1024), root / folder)
    (root / "reference.json").write_text("{}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
