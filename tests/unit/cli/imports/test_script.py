"""Shell scripts that call verl's trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.imports.inputs.script import read_call
from services.cli.imports.settings import OpenText
from services.common.errors import ConfigError

FILES = Path(__file__).parent / "files"
CALL = "python3 -m verl.trainer.main_ppo"


def arguments(script: str, **environment: str) -> list[str]:
    return read_call(script, environment).overrides


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{CALL} a=1 b=2", ["a=1", "b=2"]),
        (f"{CALL} \\\n  a=1 \\\n  b=2 $@", ["a=1", "b=2"]),
        (f"x=3\n{CALL} a=$x b=${{x}} c='$x' d=\"$x\"", ["a=3", "b=3", "c=$x", "d=3"]),
        (f'{CALL} a=${{X:-5}} b=${{Y:-"${{X:-q}}/z"}}', ["a=5", "b=q/z"]),
        (f"n=4\nm=$((n * (2 + 1024) / 3))\n{CALL} a=$m b=$((n**2 % 5))", ["a=1368", "b=1"]),
        (f'A=(a=1  # first\n  b="x y"\n)\nA+=(c=3)\n{CALL} "${{A[@]}}" d=4', ["a=1", "b=x y", "c=3", "d=4"]),
        (f'A=()\n{CALL} "${{A[@]}}" a=1', ["a=1"]),
        (f"f=\"['$D/x', '$D/y']\"\n{CALL} a=\"$f\"", ["a=['/d/x', '/d/y']"]),
        (f"{CALL} a=['p','q']", ["a=[p,q]"]),
        (f"export x=1 y=2\n{CALL} a=$x$y", ["a=12"]),
        (f"N=Qwen/X\n{CALL} a=${{N,,}}", ["a=qwen/x"]),
        (f"{CALL} a=1 2>&1 | tee log.txt", ["a=1"]),
        (f"cat <<EOF\n{CALL} no=1\nEOF\n{CALL} a=1", ["a=1"]),
        (f"# {CALL} no=1\n{CALL} a=1", ["a=1"]),
        (f"V=1 ray job submit -- {CALL} a=1", ["a=1"]),
    ],
)
def test_the_arguments_are_those_that_a_shell_would_give(script: str, expected: list[str]) -> None:
    found = arguments(script, D="/d")
    assert found == expected
    assert not any(isinstance(text, OpenText) for text in found)


@pytest.mark.parametrize("value", ["$(date +%s)", "$1", "${UNSET}", "$((UNSET + 1))", "`date`", "${A##*/}"])
def test_what_only_running_would_give_is_open(value: str) -> None:
    (text,) = arguments(f"A=x/y\n{CALL} a={value}")
    assert isinstance(text, OpenText)
    assert text.startswith("a=")


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[ "$x" = 3 ]', True),
        ('[ "$x" != 3 ]', False),
        ("[[ $x == [0-9] ]]", True),
        ("[ $x -gt 2 ]", True),
        ("[ $x -le 2 ]", False),
        ('[ -z "$x" ]', False),
        ('[ -n "$x" ]', True),
        ('[ ! "$x" = 3 ]', False),
    ],
)
def test_a_plain_condition_is_followed(condition: str, taken: bool) -> None:
    script = f"x=3\ny=before\nif {condition}; then\n  y=then\nelse\n  y=else\nfi\n{CALL} a=$y"
    assert arguments(script) == ["a=then" if taken else "a=else"]


def test_a_case_takes_the_branch_that_matches() -> None:
    script = f'case "${{DEVICE}}" in\n  gpu) n=8 ;;\n  npu|ascend)\n    n=16\n    ;;\n  *) n=0 ;;\nesac\n{CALL} a=$n'
    assert arguments(script, DEVICE="ascend") == ["a=16"]
    assert arguments(script, DEVICE="cpu") == ["a=0"]


@pytest.mark.parametrize(
    "block",
    [
        "if python3 -c x; then\n  y=2\nfi",
        "for i in 1 2; do\n  y=$i\ndone",
        "f() {\n  y=2\n}",
        "case $(uname) in\n *) y=2;;\nesac",
    ],
)
def test_what_is_not_followed_is_noted_with_its_line(block: str) -> None:
    call = read_call(f"y=1\n{block}\n{CALL} a=$y", {})
    if not block.startswith("f()"):
        assert [note.startswith("line 2: ") for note in call.notes] == [True]
    assert call.overrides == ["a=1"]


def test_options_of_hydra_name_the_configuration() -> None:
    call = read_call(f"{CALL} --config-path=./config --config-name='ppo_megatron_trainer.yaml' a=1", {})
    assert (call.config_name, call.overrides) == ("ppo_megatron_trainer", ["a=1"])


@pytest.mark.parametrize(
    "text", ["", "python3 train.py a=1", "python3 -m verl.model_merger merge", "python3 -m verl.trainer.main_eval a=1"]
)
def test_a_script_without_the_call_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no call of verl's trainer"):
        read_call(text, {})


@pytest.mark.parametrize("name", ["ppo_gsm8k_verl.sh", "dapo_verl.sh", "grpo_megatron_verl.sh"])
def test_a_published_script_has_all_its_overrides(name: str) -> None:
    text = (FILES / name).read_text()
    call = read_call(text, {"HOME": "/home/u"})
    for line in text.splitlines():
        word = line.strip().split("=")[0]
        if "." in word and " " not in word:
            assert any(override.startswith(f"{word}=") for override in call.overrides), word
