"""Command `millrace config import`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.common.errors import ConfigError
from services.common.spec.job import parse_spec

FILES = Path(__file__).parents[1] / "imports" / "files"
PPO, DAPO = str(FILES / "ppo_gsm8k_verl.sh"), str(FILES / "dapo_mindspeed.yaml")


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["config", "import", *arguments], env={"HOME": "/home/u"}, catch_exceptions=True)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_the_spec_goes_to_stdout_and_the_report_to_stderr() -> None:
    code, spec, report = run(DAPO)
    assert code == 0
    assert parse_spec(spec).learner.steps == 2000
    assert "became    megatron_training.train_iters: 2000  → learner.steps: 2000" in report


def test_files_take_both(tmp_path: Path) -> None:
    spec, report = tmp_path / "job.yaml", tmp_path / "report.txt"
    code, out, err = run("--script", PPO, "--rows", "7473", "--out", str(spec), "--report", str(report))
    assert (code, out) == (0, "")
    assert parse_spec(spec.read_text()).learner.steps == 105
    assert err.strip() == report.read_text().splitlines()[-1]


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_an_unknown_key_fails_only_when_strict(options: tuple[str, ...], code: int) -> None:
    found, spec, report = run(DAPO, "+rl_config.typo=1", *options)
    assert found == code
    assert "(rl_config.typo)" in report
    assert parse_spec(spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((DAPO, "rl_config.epochs=1,2"), "override 'rl_config.epochs=1,2'"),
        ((DAPO, "other.yaml"), "one file can be imported"),
        ((DAPO, "--script", PPO), "not both"),
        (("none.yaml",), "none.yaml: cannot be read"),
        ((DAPO, "--from", "trl"), "--from trl: there are verl, mindspeed-rl"),
        ((DAPO, "actor_config.lr=5"), r"learner\.lr: .*from actor_config\.lr"),
        ((), "nothing to import"),
    ],
)
def test_what_cannot_be_imported_says_why(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_overrides_alone_are_an_import() -> None:
    code, spec, _ = run(
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=5", "trainer.total_training_steps=9"
    )
    assert code == 0
    assert parse_spec(spec).learner.steps == 9
