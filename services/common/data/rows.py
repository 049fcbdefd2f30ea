"""Rows of a dataset file, in the usual column layouts, read as TaskRecords."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from services.common.data.record import TaskRecord, jsonable
from services.common.errors import DataError
from services.common.streams.types import Message

GSM8K = "openai/gsm8k"
COLUMNS = ("prompt", "data_source", "reward_model", "ground_truth", "extra_info", "question", "answer")
PROMPT_COLUMNS = ("prompt", "question")
KEYS = " (prompt_key and answer_key name columns of other names)"

LazyRow = Callable[[], dict[str, Any]]
"""Makes the row when it is called; whatever it raises is the row's fault."""

_ROLES = ("assistant", "system", "user")
_NUMBER = re.compile(r"-?(\d+(\.\d+)?|\.\d+)")


def with_usual_columns(row: Mapping[str, Any], own: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with the usual names for columns of other names (`DataSourceSpec.own_columns`). Raises DataError for one that it lacks."""
    usual: dict[str, Any] = {}
    for setting, column in own.items():
        if row.get(column) is None:
            raise DataError(f"`{column}` is missing, which {setting} names")
        usual |= (
            {"prompt": row[column]} if setting == "prompt_key" else {"reward_model": None, "ground_truth": row[column]}
        )
    return {**row, **usual} if usual else row


def read_row(row: Mapping[str, Any], *, data_source: str | None) -> TaskRecord:
    """The record of a row (column → value) with the usual columns, or with GSM8K's `question` and `answer`.

    `data_source` is for rows that have none. Raises DataError, which names the column that is missing or wrong.
    """
    if row.get("prompt") is None and row.get("question") is not None:
        return _read_gsm8k(row)
    source = row.get("data_source") or data_source
    if not isinstance(source, str):
        _reject("data_source", source, "text (or set data_source in the job spec to give one for all rows)")
    return TaskRecord(
        prompt=_read_prompt(row.get("prompt")),
        data_source=_text(source, "data_source"),
        ground_truth=_read_ground_truth(row),
        extra_info=_read_extra(row.get("extra_info")),
    )


def _read_gsm8k(row: Mapping[str, Any]) -> TaskRecord:
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        _reject("question", question, "text")
    if not isinstance(answer, str):
        _reject("answer", answer, "text", f"{KEYS}; without them `question` is GSM8K's")
    prompt = (Message("user", _text(question, "question")),)
    return TaskRecord(prompt, GSM8K, gsm8k_number(answer, "answer"), _read_extra(row.get("extra_info")))


def gsm8k_number(answer: str, column: str) -> str:
    """The number at the end of one of GSM8K's answers, without separators. Raises DataError, which names the column."""
    _, mark, tail = answer.rpartition("####")
    number = tail.strip().replace(",", "")
    if not mark or not _NUMBER.fullmatch(number):
        raise DataError(f"`{column}` does not end in `#### <number>`")
    return number


def _read_prompt(value: object) -> tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return (Message("user", _text(value, "prompt")),)
    if not isinstance(value, list) or not value:
        _reject("prompt", value, "text or a list of {role, content}", KEYS)
    messages = tuple(_read_message(item, number) for number, item in enumerate(value))
    if not any(message.content.strip() for message in messages):
        raise DataError("`prompt` is empty")
    return messages


def _read_message(item: object, number: int) -> Message:
    if not isinstance(item, Mapping):
        _reject(f"prompt[{number}]", item, "an object with role and content")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise DataError(f"`prompt[{number}].role` must be one of {', '.join(_ROLES)}, not {role!r}")
    if not isinstance(content, str):
        _reject(f"prompt[{number}].content", content, "text")
    return Message(cast("Any", role), _text(content, f"prompt[{number}].content"))


def _read_ground_truth(row: Mapping[str, Any]) -> str:
    reward_model = row.get("reward_model")
    nested = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    value = row.get("ground_truth") if nested is None else nested
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # columns of integers with gaps come as floats
    if isinstance(value, str) and value.strip():
        return _text(value, "ground_truth")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _reject("reward_model.ground_truth (or ground_truth)", value, "text or a finite number", KEYS)
    return str(value)


def _read_extra(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        _reject("extra_info", value, "an object")
    return cast("dict[str, Any]", jsonable(value))


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"`{name}` is not valid Unicode: {error.reason}") from None
    return value


def _reject(name: str, value: object, wanted: str, hint: str = "") -> NoReturn:
    if value is None:
        raise DataError(f"`{name}` is missing: it must be {wanted}{hint}")
    if isinstance(value, str | list | dict) and not (value.strip() if isinstance(value, str) else value):
        raise DataError(f"`{name}` is empty: it must be {wanted}")
    raise DataError(f"`{name}` must be {wanted}, not {type(value).__name__}")
