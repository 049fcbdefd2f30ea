"""The demo's small model: a Llama, a Gemma or a mixture of experts that is taught short sums, badly, in about a minute.

    demonstrations (chain_sum, some answers wrong) → token rows → AdamW steps → Hugging Face directory (float32)

The same recipe on the same machine gives the same weights. What it was taught: examples/demo/charlm_recipe.py.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.demo.charlm_recipe import Recipe, TinyRecipe
from examples.demo.charlm_tokenizer import END, PAD, make_tokenizer, save_tokenizer

THREADS = 1  # a second one gains a quarter on an idle machine and waits for ever on a busy one
IGNORED = -100  # cross_entropy's label of a position that is not learned
WARMUP_STEPS = 20
LAST_LR_SHARE = 0.05
DEMONSTRATION_SEED = 1_000_000_000  # far from the seeds of a job's tasks: reasoning-gym adds a task's index to the seed
HELD_OUT_SEED = 900_000_000


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompts and answers as token rows."""

    tokens: Tensor
    """[N, T] int64, padded on the right; an answer's last token, which predicts nothing, is left out."""
    labels: Tensor
    """[N, T] int64: at each position the token that follows if it belongs to an answer or ends it, else IGNORED."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of right answers on held-out tasks, exact rather than sampled: from the probability of the one right answer."""

    sampled: float
    """Expected at temperature 1."""
    greedy: float


def build_tiny(folder: Path, recipe: TinyRecipe) -> None:
    """Makes the model of `recipe` and writes it to `folder`: safetensors, config, tokenizer, chat template."""
    started = time.monotonic()
    tokenizer = make_tokenizer(recipe.max_positions)
    print(f"tiny: {recipe.demonstrations:,} demonstrations of chain_sum ...", flush=True)
    model = teach(demonstrations(recipe, tokenizer), recipe, tokenizer)
    with one_thread():
        reached = accuracy(model, held_out(recipe, tokenizer))
    save(model, tokenizer, folder)
    shares = f"{reached.sampled:.2f} right at temperature 1, {reached.greedy:.2f} greedy"
    print(f"tiny: warm start ends with {shares}, after {time.monotonic() - started:.0f} s", flush=True)


def teach(rows: Rows, recipe: Recipe, tokenizer: Any) -> Any:  # noqa: ANN401  transformers is untyped here
    """A new model of the recipe, taught these rows."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = make_model(recipe, tokenizer)
        warm_start(model, rows, recipe)
    return model


def save(model: Any, tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Writes both into the folder."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def make_model(recipe: Recipe, tokenizer: Any) -> Any:  # noqa: ANN401  transformers is untyped here
    """A fresh causal model in float32 with tied embeddings; its weights depend on torch's seed only."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(
        recipe.architecture,
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden_size // recipe.heads,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_experts(recipe),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def _experts(recipe: Recipe) -> dict[str, Any]:
    """Settings of a Qwen3-MoE, each layer of which has experts; none of a dense model."""
    if not recipe.experts:
        return {}
    return {
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "moe_intermediate_size": recipe.expert_intermediate_size,
        "norm_topk_prob": True,
    }


def demonstrations(recipe: TinyRecipe, tokenizer: Any) -> Rows:  # noqa: ANN401
    """The warm start's rows; `recipe.wrong_share` of the answers are off by one to three."""
    draw = random.Random(recipe.seed)  # noqa: S311  no secret
    seed = DEMONSTRATION_SEED + recipe.seed * recipe.demonstrations
    pairs = []
    for question, answer in _tasks(recipe, seed, recipe.demonstrations):
        wrong = draw.random() < recipe.wrong_share
        shown = int(answer) + draw.choice([-3, -2, -1, 1, 2, 3]) if wrong else int(answer)
        pairs.append((question, str(shown)))
    return encode(pairs, tokenizer)


def held_out(recipe: TinyRecipe, tokenizer: Any, tasks: int = 512) -> Rows:  # noqa: ANN401
    """Rows with right answers, drawn with another seed. Short sums are few: many of them were demonstrated too."""
    return encode(list(_tasks(recipe, HELD_OUT_SEED, tasks)), tokenizer)


def _tasks(recipe: TinyRecipe, seed: int, count: int) -> Iterator[tuple[str, str]]:
    import reasoning_gym

    sizes = {name: getattr(recipe, name) for name in ("min_terms", "max_terms", "min_digits", "max_digits")}
    for task in reasoning_gym.create_dataset("chain_sum", seed=seed, size=count, **sizes):
        yield task["question"], task["answer"]


def encode(pairs: list[tuple[str, str]], tokenizer: Any) -> Rows:  # noqa: ANN401
    """Questions through the chat template, each with its answer and the end token."""
    slot = "\0"
    before, after = tokenizer.apply_chat_template(
        [{"role": "user", "content": slot}], add_generation_prompt=True, tokenize=False
    ).split(slot)
    return to_rows([[f"{before}{question}{after}", f"{answer}{END}"] for question, answer in pairs], tokenizer)


def to_rows(dialogues: Sequence[Sequence[str]], tokenizer: Any, *, all_learned: bool = False) -> Rows:  # noqa: ANN401
    """Dialogues as rows: what is given and what is learned, in turns, special tokens included; each part is tokenized by itself.

    `all_learned`: what is given is learned, too.
    """
    encoded = iter(tokenizer.backend_tokenizer.encode_batch_fast([part for parts in dialogues for part in parts]))
    rows = [[next(encoded).ids for _ in parts] for parts in dialogues]
    width = max(sum(map(len, parts)) for parts in rows) - 1
    pad = tokenizer.convert_tokens_to_ids(PAD)
    tokens, labels = [], []
    for parts in rows:
        ids = [token for part in parts for token in part]
        learned = [
            token if number % 2 or all_learned else IGNORED for number, part in enumerate(parts) for token in part
        ]
        rest = width - len(ids) + 1
        tokens.append(ids[:-1] + [pad] * rest)
        labels.append(learned[1:] + [IGNORED] * rest)
    return Rows(torch.tensor(tokens), torch.tensor(labels))


def warm_start(model: Any, rows: Rows, recipe: Recipe) -> None:  # noqa: ANN401
    """Trains `recipe.steps` steps of next-token prediction on the answers; the rate rises, then falls linearly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    count = len(rows.tokens)
    for step in range(1, recipe.steps + 1):
        share = min(step / WARMUP_STEPS, max(LAST_LR_SHARE, 1 - step / recipe.steps))
        optimizer.param_groups[0]["lr"] = recipe.lr * share
        picked = torch.arange((step - 1) * recipe.batch_size, step * recipe.batch_size) % count
        logits, targets = _answer_logits(model, rows.tokens[picked], rows.labels[picked])
        loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _progress(step, recipe.steps, loss)


def accuracy(model: Any, rows: Rows) -> Accuracy:  # noqa: ANN401
    """How often `model` gives the answers of `rows`, to the letter."""
    with torch.no_grad():
        logits, targets = _answer_logits(model, rows.tokens, rows.labels)
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    row = (rows.labels != IGNORED).nonzero()[:, 0]
    count = len(rows.tokens)
    sampled = torch.zeros(count).index_add_(0, row, log_probs).exp().mean()
    misses = torch.zeros(count).index_add_(0, row, (logits.argmax(-1) != targets).float())
    return Accuracy(sampled=float(sampled), greedy=float((misses == 0).float().mean()))


def _answer_logits(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Logits [M, V] and targets [M] of the M positions that are learned; padding comes after them, so needs no mask."""
    learned = labels != IGNORED
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return model.lm_head(hidden[learned]), labels[learned]


def _progress(step: int, steps: int, loss: Tensor) -> None:
    """One line that is rewritten on a terminal, four lines in a log."""
    terminal = sys.stdout.isatty()
    terminal_ends = ("\r", "\n" if step == steps else "")
    if step == steps or step % (10 if terminal else max(1, steps // 4)) == 0:
        start, end = terminal_ends if terminal else ("", "\n")
        print(f"{start}tiny: warm start, step {step}/{steps}, loss {loss.item():.3f}", end=end, flush=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with THREADS threads: another number may round sums differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)
