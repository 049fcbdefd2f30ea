"""Conversion of a chunk's rows to tasks: parsed, read by the handler, checked as the learner checks them, and counted in tokens.

It is a pure function of settings and chunk, and runs in any process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from services.cli.prepare.handlers import RowHandler, find_handler
from services.cli.prepare.prompt_types import prompt_type
from services.cli.prepare.raw import Chunk, Form
from services.cli.prepare.settings import ChatTemplate, PrepareSettings
from services.common.data.bounds import DataBounds
from services.common.data.record import TaskRecord, jsonable, prepare
from services.common.data.rows import read_row
from services.common.errors import ConfigError, DataError
from services.common.spec.data import DataSourceSpec
from services.common.spec.document import no_constant
from services.common.streams.types import Message

LABELS = "labels"
"""Of `dataset_additional_keys`: MindSpeed-RL's name of the reference answer, which is always kept."""
_REASON_CHARS = 300


class Converted(NamedTuple):
    """A row as a task, or the reason why it is none; MessagePack carries it as a list."""

    number: int
    reason: str
    """Empty for a task."""
    prompt: Sequence[Sequence[str]] = ()
    """(role, content) of each message."""
    data_source: str = ""
    ability: str = ""
    style: str = ""
    ground_truth: str = ""
    extra: Sequence[str | None] = ()
    """Values of `extra_keys`."""
    length: int = 0
    """Of the prompt: tokens, or characters without a tokenizer."""
    digest: bytes = b""
    """Of the prompt, 16 bytes."""


class Converter:
    """Converter of chunks, with handler, tokenizer and prompt type."""

    def __init__(self, settings: PrepareSettings, bounds: DataBounds) -> None:
        """Raises ConfigError for a handler, a prompt type or a tokenizer that is not there."""
        self._settings, self._bounds = settings, bounds
        self._handler: RowHandler = find_handler(settings.handler_name)
        self._type = prompt_type(settings.prompt_type)
        self._template = DataSourceSpec(
            source="rows.jsonl", prompt_template=self._type.template, data_source=settings.data_source
        )
        self._extra = extra_keys(settings)
        self._tokenizer: Any = _load_tokenizer(settings)

    def convert(self, chunk: Chunk) -> list[Converted]:
        """Each row of the chunk, in order."""
        made: list[Converted] = []
        for number, row in zip(chunk.numbers, self._raw(chunk), strict=True):
            try:
                made.append(self._convert(number, row() if callable(row) else row))
            except Exception as error:  # noqa: BLE001  the row is at fault for whatever a handler raises
                made.append(Converted(number, _describe(error)))
        self._count(made)
        return made

    def _raw(self, chunk: Chunk) -> Iterator[Any]:
        """The rows, or functions that make them and raise what is wrong with them."""
        if chunk.form is not Form.BATCH:
            parse = self._parse if chunk.form is Form.JSON else self._parse_cells
            yield from ((lambda text=text: parse(text)) for text in chunk.rows)
            return
        import pyarrow as pa

        with pa.ipc.open_stream(chunk.rows[0]) as stream:
            table = stream.read_all()
        try:
            yield from table.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError):  # one row cannot become objects: the others can
            yield from ((lambda at=at: table.slice(at, 1).to_pylist()[0]) for at in range(table.num_rows))

    def _parse(self, text: bytes) -> Any:  # noqa: ANN401  a JSON value
        self._bounds.check_row(len(text))
        return json.loads(text, parse_constant=no_constant)

    def _parse_cells(self, text: bytes) -> dict[str, str]:
        header, cells = self._parse(text)
        if len(cells) != len(header):
            raise DataError(f"has {len(cells)} cells, and the header {len(header)}")
        return dict(zip(header, cells, strict=True))

    def _convert(self, number: int, row: Any) -> Converted:  # noqa: ANN401
        if not isinstance(row, dict):
            raise DataError(f"must be an object, not {type(row).__name__}")
        made = dict(self._handler(row, self._settings.map_keys))
        model = made.get("reward_model") or {}
        truth = model.get("ground_truth", made.get("ground_truth"))
        if truth is None or not str(truth).strip():
            truth = self._settings.default_ground_truth
        record = self._finish(
            read_row(made | {"reward_model": {"ground_truth": truth}}, data_source=self._settings.data_source)
        )
        given = made.get("extra_info") or {}
        return Converted(
            number=number,
            reason="",
            prompt=[[message.role, message.content] for message in record.prompt],
            data_source=record.data_source,
            ability=str(made.get("ability") or ""),
            style=str(model.get("style") or "rule"),
            ground_truth=record.ground_truth,
            extra=[_as_text(given.get(key, row.get(key))) for key in self._extra],
            length=sum(len(message.content) for message in record.prompt),
            digest=_digest(record),
        )

    def _finish(self, record: TaskRecord) -> TaskRecord:
        """The record with the prompt type's instruction, checked as every record is when it is read."""
        if self._type.system and record.prompt[0].role != "system":
            record = replace(record, prompt=(Message("system", self._type.system), *record.prompt))
        return self._bounds.check(prepare(record, self._template))

    def _count(self, made: list[Converted]) -> None:
        """Replaces the lengths in characters by tokens, all rows at once; a row that the template refuses is set aside."""
        if self._tokenizer is None:
            return
        texts, places = [], []
        for place, row in enumerate(made):
            if row.reason:
                continue
            try:
                texts.append(self._text(row))
                places.append(place)
            except Exception as error:  # noqa: BLE001  a template may raise anything
                made[place] = Converted(row.number, f"the chat template refuses the prompt: {_describe(error)}")
        if texts:
            plain = self._settings.chat_template is ChatTemplate.NONE
            ids = self._tokenizer(texts, add_special_tokens=plain)["input_ids"]
            for place, tokens in zip(places, ids, strict=True):
                made[place] = made[place]._replace(length=len(tokens))

    def _text(self, row: Converted) -> str:
        messages = [{"role": role, "content": content} for role, content in row.prompt]
        if self._settings.chat_template is ChatTemplate.NONE:
            return "\n".join(message["content"] for message in messages)
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def extra_keys(settings: PrepareSettings) -> list[str]:
    """Keys of `extra_info` beside file, row and split: the handler's own, then `dataset_additional_keys`."""
    own = getattr(find_handler(settings.handler_name), "extra", ())
    return [key for key in dict.fromkeys([*own, *settings.dataset_additional_keys]) if key != LABELS]


def _load_tokenizer(settings: PrepareSettings) -> Any:  # noqa: ANN401  transformers is untyped
    if settings.tokenizer_name_or_path is None:
        return None
    from transformers import AutoTokenizer

    field = "tokenizer_name_or_path"
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_name_or_path, trust_remote_code=False)
    except Exception as error:  # the files are at fault for whatever loading them raises
        raise ConfigError(
            f"{settings.tokenizer_name_or_path} cannot be loaded: {_describe(error)}", field=field
        ) from error
    if settings.chat_template is ChatTemplate.MODEL and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{settings.tokenizer_name_or_path} has no chat template: set chat_template: none", field=field
        )
    tokenizer.model_max_length = 10**9  # no warning of long prompts: they are counted here
    return tokenizer


def _as_text(value: object) -> str | None:
    """A text as it is, anything else as JSON: a column has one type."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(jsonable(value), ensure_ascii=False)


def _digest(record: TaskRecord) -> bytes:
    text = json.dumps([[message.role, message.content] for message in record.prompt])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:_REASON_CHARS]
    return text if isinstance(error, ConfigError | ValueError) and text else f"{type(error).__name__}: {text}"
