"""The small model: its tokenizer loses nothing, its rows say what is learned, its accuracy is what sampling would find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import torch

from examples.demo.charlm import IGNORED, Rows, accuracy, demonstrations, encode, held_out, make_model, warm_start
from examples.demo.charlm_recipe import TinyRecipe
from examples.demo.charlm_tokenizer import END, VOCAB_SIZE, make_tokenizer, save_tokenizer

SMALL = TinyRecipe(hidden_size=64, intermediate_size=64, heads=2, demonstrations=512, steps=40, batch_size=64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(SMALL.max_positions)


def chat(tokenizer: Any, text: str) -> str:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


@pytest.mark.parametrize("config", [{}, {"allow_negation": True, "max_digits": 6}])
def test_every_prompt_survives_the_round_trip(tokenizer: Any, config: dict[str, Any]) -> None:
    for task in reasoning_gym.create_dataset("chain_sum", seed=3, size=200, **config):
        text = chat(tokenizer, task["question"])
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "a  b\n\tc ", "12 + -3 - 4 =", "Größe 漢字 🎉", "<|user|>x<|end|>", "x = y, z . !"]
)
def test_any_text_survives_the_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_prompt_is_one_token_a_digit_and_one_a_phrase(tokenizer: Any) -> None:
    question = "State the final answer to the following arithmetic problem: 7 - 12 + 3 ="
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|user|>", question[:60], "7", " - ", "1", "2", " + ", "3", " =", "<|assistant|>",
    ]  # fmt: skip


def test_the_saved_tokenizer_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = chat(tokenizer, "State the final answer to the following arithmetic problem: 1 - 2 =")
    assert chat(loaded, "State the final answer to the following arithmetic problem: 1 - 2 =") == text
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded) == VOCAB_SIZE
    assert loaded.eos_token == END


def test_the_rows_learn_the_answer_and_its_end_only(tokenizer: Any) -> None:
    rows = encode(
        [("State the final answer to the following arithmetic problem: 9 + 8 =", "17"), ("1", "-2")], tokenizer
    )
    for tokens, labels, answer in zip(rows.tokens, rows.labels, ("17", "-2"), strict=True):
        learned = (labels != IGNORED).nonzero()[:, 0]
        assert tokenizer.decode(labels[learned]) == f"{answer}{END}"
        assert torch.equal(tokens[learned[1:]], labels[learned[:-1]])
        assert tokenizer.decode([int(tokens[learned[0]])]) == "<|assistant|>"


def test_the_wrong_share_of_the_demonstrations_is_wrong(tokenizer: Any) -> None:
    recipe = TinyRecipe(demonstrations=2000, wrong_share=0.25)
    wrong = 0
    rows = demonstrations(recipe, tokenizer)
    for tokens, labels in zip(rows.tokens, rows.labels, strict=True):
        prompt = tokenizer.decode(tokens).partition("<|assistant|>")[0]
        shown = tokenizer.decode(labels[labels != IGNORED]).removesuffix(END)
        expression = prompt.partition("problem: ")[2].partition(" =")[0]
        right = sum(int(part) for part in expression.replace("- ", "-").replace("+ ", "+").split())
        wrong += int(shown) != right
    assert 0.21 < wrong / 2000 < 0.29


def test_the_exact_accuracy_is_what_sampling_finds(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = make_model(SMALL, tokenizer)
    tasks = [(f"{a}", f"{a % 2}") for a in range(10)]
    rows = encode(tasks, tokenizer)
    warm_start(model, rows, SMALL)
    exact = accuracy(model, rows)
    found = [answers(model, Rows(rows.tokens[i : i + 1], rows.labels[i : i + 1]), 400) for i in range(10)]
    assert exact.sampled == pytest.approx(sum(found) / 10, abs=0.04)
    assert 0.2 < exact.sampled < 1.0


def answers(model: Any, row: Rows, samples: int) -> float:
    """The share of `samples` continuations, drawn token by token, that equal the row's answer."""
    learned = (row.labels[0] != IGNORED).nonzero()[:, 0]
    texts = row.tokens[:, : int(learned[0]) + 1].repeat(samples, 1)
    with torch.no_grad():
        for _ in learned:
            probabilities = model(texts).logits[:, -1].softmax(-1)
            texts = torch.cat([texts, torch.multinomial(probabilities, 1)], dim=1)
    return float((texts[:, int(learned[0]) + 1 :] == row.labels[0, learned]).all(1).float().mean())


def test_the_warm_start_learns(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = make_model(SMALL, tokenizer)
    rows = held_out(SMALL, tokenizer)
    before = accuracy(model, rows).sampled
    warm_start(model, demonstrations(SMALL, tokenizer), SMALL)
    assert accuracy(model, rows).sampled > 10 * before
