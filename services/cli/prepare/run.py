"""Run of a preparation.

input ──► chunks ──► workers ──► broken, overlong, duplicate? ──► rejected.jsonl
                                   └─► split by seed and prompt ──► train.parquet, validation.parquet
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from services.cli.prepare.convert import Converted, extra_keys
from services.cli.prepare.duplicates import Prompts
from services.cli.prepare.output import SPLITS, Output
from services.cli.prepare.raw import input_files, read_chunks
from services.cli.prepare.settings import PrepareSettings
from services.cli.prepare.summary import BROKEN, DUPLICATE, OVERLONG, Summary
from services.cli.prepare.workers import convert_all
from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.errors import ConfigError, DataError

Report = Callable[[int, int, int], None]
"""Called with the rows and bytes that were read, and the bytes of the input."""


def run(settings: PrepareSettings, report: Report) -> dict[str, Any]:
    """Prepares the data; the summary, which is also written. The order of the rows is the input's.

    Raises:
        ConfigError: a wrong setting, a missing package, output that is there already.
        DataError: a file that cannot be read, or no row was taken.
    """
    files = input_files(settings.input)
    check_packages(settings, [file.suffix for file in files])
    size = sum(file.stat().st_size for file in files)
    bounds = DataBounds.of(Settings())
    summary = Summary("characters" if settings.tokenizer_name_or_path is None else "tokens")
    splits = SPLITS if settings.validation_share else SPLITS[:1]
    with Output(settings.prefix, splits, extra_keys(settings), overwrite=settings.overwrite) as output:
        prompts = Prompts(output.folder / "prompts")
        try:
            for chunk, rows in convert_all(read_chunks(files, bounds), settings, bounds):
                for row in rows:
                    _place(settings, chunk.file, row, prompts, output, summary)
                summary.rows += len(rows)
                report(summary.rows, chunk.done_bytes, size)
        finally:
            prompts.close()
        if not summary.taken:
            raise DataError(f"no row was taken: {summary.first_reason()}", field="input")
        record = summary.as_record()
        return record | {"files": output.publish(record)}


def check_packages(settings: PrepareSettings, suffixes: list[str]) -> None:
    """Raises ConfigError, with the remedy, when a package that this run needs is not installed."""
    needed = ["pyarrow"]
    needed += ["ijson"] if ".json" in suffixes else []
    needed += ["transformers", "jinja2"] if settings.tokenizer_name_or_path is not None else []
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        hint = "install them with `pip install 'millrace[data]'`"
        raise ConfigError(
            f"`millrace data prepare` needs packages that are not installed ({', '.join(missing)}): {hint}"
        )


def split_of(seed: int, prompt: bytes, validation_share: float) -> str:
    """The split of a prompt's digest: the same in every run, whatever the other rows are."""
    digest = hashlib.blake2b(prompt, digest_size=8, key=seed.to_bytes(8)).digest()
    return SPLITS[int.from_bytes(digest) < validation_share * 2**64]


def _place(
    settings: PrepareSettings, file: str, row: Converted, prompts: Prompts, output: Output, summary: Summary
) -> None:
    def reject(reason: str, detail: str) -> None:
        summary.reject(file, row.number, reason, detail)
        output.reject(file, row.number, reason, detail)

    if row.reason:
        reject(BROKEN, row.reason)
    elif settings.seq_length is not None and row.length >= settings.seq_length:
        reject(OVERLONG, f"the prompt has {row.length} tokens; seq_length is {settings.seq_length}")
    elif first := prompts.add(row.digest, row.ground_truth, file, row.number):
        answer = "" if first.same_answer else ", with another answer"
        if not first.same_answer:
            summary.count_other_answer()
        reject(DUPLICATE, f"the same prompt as {first.file}: row {first.number}{answer}")
    else:
        split = split_of(settings.seed, row.digest, settings.validation_share)
        output.take(split, file, row)
        summary.take(split, row.data_source, row.length)
