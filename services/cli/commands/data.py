"""Commands `millrace data`: preparation of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.commands import hubs
from services.cli.commands.options import AsJson
from services.cli.views.terminal import open_console, print_result

app = typer.Typer(
    help="Datasets: prepare rows as tasks; fetch files of hubs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command("pull")(hubs.pull_data)
app.command("list")(hubs.list_data)
app.command("remove")(hubs.remove_data)


@app.callback()
def about() -> None:
    """Datasets: prepare rows as tasks; fetch files of hubs."""


@app.command()
def prepare(
    file: Annotated[Path | None, typer.Argument(help="Settings, YAML or JSON; options override them.")] = None,
    input_: Annotated[
        str | None, typer.Option("--input", help="A .parquet, .jsonl or .json file, or a folder of them.")
    ] = None,
    output_prefix: Annotated[str | None, typer.Option(help="Beginning of the output's paths.")] = None,
    handler_name: Annotated[str | None, typer.Option(help="What the rows are: gsm8k, math, alpaca, chat, …")] = None,
    tokenizer_type: Annotated[str | None, typer.Option(help="HuggingFaceTokenizer.")] = None,
    tokenizer_name_or_path: Annotated[
        str | None, typer.Option(help="Directory or hub id; lengths are then in tokens.")
    ] = None,
    chat_template: Annotated[str | None, typer.Option(help="`model` or `none`: how tokens are counted.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Prompts of as many tokens or more are dropped.")] = None,
    prompt_type: Annotated[str | None, typer.Option(help="Instruction around the prompts, such as qwen_r1.")] = None,
    map_keys: Annotated[str | None, typer.Option(help='Columns by role, as JSON: \'{"prompt": "problem"}\'.')] = None,
    dataset_additional_keys: Annotated[
        list[str] | None, typer.Option(help="Column to keep in extra_info; may be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read and count rows.")] = None,
    log_interval: Annotated[int | None, typer.Option(help="Rows between two lines of progress.")] = None,
    validation_share: Annotated[float | None, typer.Option(help="Share of the prompts that is held out.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the split.")] = None,
    data_source: Annotated[str | None, typer.Option(help="Overrides the rows' data_source.")] = None,
    default_ground_truth: Annotated[str | None, typer.Option(help="Reference answer of rows that have none.")] = None,
    *,
    overwrite: Annotated[bool | None, typer.Option("--overwrite", help="Replace the output of an earlier run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prepare a dataset: parquet files that `data.train.source` takes, and a summary of what was dropped and why."""
    options: dict[str, Any] = {
        "input": input_, "output_prefix": output_prefix, "handler_name": handler_name, "tokenizer_type": tokenizer_type,
        "tokenizer_name_or_path": tokenizer_name_or_path, "chat_template": chat_template, "seq_length": seq_length,
        "prompt_type": prompt_type, "map_keys": map_keys, "dataset_additional_keys": dataset_additional_keys, "workers": workers,
        "log_interval": log_interval, "validation_share": validation_share, "seed": seed, "data_source": data_source,
        "default_ground_truth": default_ground_truth, "overwrite": overwrite,
    }  # fmt: skip
    from millrace.document import read_mapping
    from services.cli.prepare.run import run
    from services.cli.prepare.settings import read_settings
    from services.cli.prepare.workers import block_torch
    from services.cli.views.prepare import PrepareProgress, print_prepared
    from services.common.spec.document import parse_document

    block_torch()
    if map_keys is not None:
        options["map_keys"] = parse_document(map_keys)
    given = {name: value for name, value in options.items() if value is not None}
    document = {} if file is None else read_mapping(file, "`input`, `handler_name` and `output_prefix`")
    settings = read_settings(document | given)
    try:
        with PrepareProgress(open_console(stderr=True), settings.log_interval) as progress:
            summary = run(settings, progress.report)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(130) from None
    print_result(summary, print_prepared, as_json=as_json)
