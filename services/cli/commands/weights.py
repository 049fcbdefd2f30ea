"""Commands `millrace weights`: conversion of checkpoints, and what a directory of weights holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, complete_job
from services.cli.views.terminal import open_console, print_json
from services.learner.conversion.request import Conversion, Direction, RoleName, TensorType

app = typer.Typer(
    help="Weights: convert checkpoints to Hugging Face directories and back, and look into either.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Source = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A job's id (its newest checkpoint), or a checkpoint's directory.",
        autocompletion=complete_job,
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make; it must not be there yet.")]
WantedType = Annotated[
    TensorType | None, typer.Option("--dtype", help="Type of the tensors (default: the model's own).")
]


@app.callback()
def about() -> None:
    """Weights: convert checkpoints to Hugging Face directories and back, and look into either."""


@app.command("to-hf")
def to_hf(
    checkpoint: Source,
    out: Out,
    role: Annotated[
        RoleName, typer.Option(help="Which model; a critic becomes a sequence classifier.")
    ] = RoleName.ACTOR,
    model: Annotated[
        Path | None, typer.Option(help="Directory with config and tokenizer (default: the model that the job names).")
    ] = None,
    dtype: WantedType = None,
    home: Home = DEFAULT_HOME,
    *,
    as_json: AsJson = False,
) -> None:
    """Make a Hugging Face directory of a checkpoint, whatever sizes of TP, PP and DP it was saved with."""
    from services.learner.conversion.report import find_weights

    request = _request(Direction.TO_HUGGING_FACE, find_weights(checkpoint, home.resolve()), out, home, dtype)
    _convert(request, role=role, model=None if model is None else str(model.absolute()), as_json=as_json)


@app.command("to-megatron")
def to_megatron(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory.")],
    out: Out,
    tp: Annotated[int, typer.Option("--tp", min=1, max=64, help="Tensor-parallel size of the ranks' files.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, max=64, help="Pipeline-parallel size.")] = 1,
    dtype: WantedType = None,
    home: Home = DEFAULT_HOME,
    *,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of weights only, which a job can begin with (`checkpoint.load`) in any layout."""
    from services.learner.conversion.report import find_weights

    source = find_weights(str(model), home.resolve())
    request = _request(Direction.TO_MEGATRON, source, out, home, dtype)
    _convert(request, tensor_parallel_size=tp, pipeline_parallel_size=pp, as_json=as_json)


@app.command()
def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A job's id, a checkpoint or a Hugging Face directory.", autocompletion=complete_job
        ),
    ],
    home: Home = DEFAULT_HOME,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor: name, shape, type, file.")] = False,
    verify: Annotated[
        bool, typer.Option(help="Compute the digests of a checkpoint's files; --no-verify reads headers only.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Show what weights a directory holds, their layout and roles, and whether it verifies; ends with 1 where it does not."""
    from services.cli.views.weights import print_report
    from services.learner.conversion.report import find_weights
    from services.learner.conversion.report import inspect as look

    report = look(find_weights(path, home.resolve()), verify=verify)
    if as_json:
        print_json(report.as_record(tensors=tensors))
    else:
        print_report(open_console(), report, tensors=tensors)
    raise typer.Exit(1 if report.problems else 0)


def _request(direction: Direction, source: Path, out: Path, home: Path, dtype: TensorType | None) -> Conversion:
    from services.common.config.settings import load_settings

    return Conversion(
        direction=direction,
        source=str(source),
        out=str(out.absolute()),
        home=str(home.resolve()),
        model_roots=tuple(str(root.absolute()) for root in load_settings().model_roots),
        dtype=dtype,
    )


def _convert(request: Conversion, *, as_json: bool, **options: RoleName | str | int | None) -> None:
    from dataclasses import asdict, replace

    from services.cli.views.weights import print_converted
    from services.learner.conversion.run import run

    try:
        converted = run(replace(request, **options))  # type: ignore[arg-type]
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(asdict(converted))
    else:
        print_converted(open_console(), converted)
