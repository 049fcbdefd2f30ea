"""Schemas of the OpenAI-compatible paths: parameters that are supported, ignored, or refused by name; and the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from services.common.config.inference import MAX_TOKENS
from services.gateway.schemas import EXAMPLE_JOB_ID, Answer

MAX_MESSAGES = 1000
MAX_STOPS = 4


def _only(*values: object) -> AfterValidator:
    """Validator of a parameter that is not supported: it accepts only values without effect."""

    def check(value: object) -> object:
        if value is not None and not any(value == known and type(value) is type(known) for known in values):
            raise PydanticCustomError("unsupported_parameter", "this parameter is not supported")
        return value

    return AfterValidator(check)


def _not_supported() -> Any:  # noqa: ANN401  as pydantic's Field
    return Field(default=None, description="Not supported: leave it out.")


def _ignored() -> Any:  # noqa: ANN401  as pydantic's Field
    return Field(default=None, description="Accepted and passed over.")


def _valid_unicode(value: str) -> str:
    """JSON can carry halves of surrogate pairs; tokenizers and protobuf cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "must be valid Unicode") from None
    return value


Text = Annotated[str, AfterValidator(_valid_unicode)]
StopString = Annotated[Text, StringConstraints(min_length=1, max_length=256)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Request(BaseModel):
    """Base of requests: a misspelt parameter is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Request):
    """How to stream."""

    include_usage: bool = Field(default=False, description="Send token counts in a last chunk.")
    include_obfuscation: Any = _ignored()


class TextPart(_Request):
    """A part of a message."""

    type: Literal["text"] = Field(description="`text`: there are no others.")
    text: Text = Field(description="The text.")


class ChatMessage(_Request):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="Who speaks; `developer` is read as `system`. The model's chat template may refuse roles."
    )
    content: Text | list[TextPart] = Field(description="The text, or its parts.")
    name: Any = _ignored()

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _CompletionBase(_Request):
    """Parameters of both kinds of request."""

    model: Text = Field(description="A job's id.", examples=[EXAMPLE_JOB_ID])
    max_tokens: TokenCount | None = Field(
        default=None, description="Longest answer, tokens (default: as many as the context holds, at most the limit)."
    )
    temperature: float | None = Field(default=None, ge=0, le=2, description="Sampling temperature (default 1).")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling (default 1).")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="The answer ends before the first of these."
    )
    stream: bool | None = Field(default=None, description="Send the answer as it is sampled (server-sent events).")
    stream_options: StreamOptions | None = Field(default=None, description="How to stream.")
    n: Annotated[Any, _only(1)] = Field(default=None, description="1: one answer per request.")
    seed: Annotated[Any, _only()] = _not_supported()
    frequency_penalty: Annotated[Any, _only(0, 0.0)] = _not_supported()
    presence_penalty: Annotated[Any, _only(0, 0.0)] = _not_supported()
    logit_bias: Annotated[Any, _only({})] = _not_supported()
    user: Any = _ignored()

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_CompletionBase):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation so far.", examples=[[{"role": "user", "content": "2 + 3 ="}]]
    )
    max_completion_tokens: TokenCount | None = Field(default=None, description="The newer name of `max_tokens`.")
    logprobs: Annotated[Any, _only(False)] = _not_supported()
    top_logprobs: Annotated[Any, _only(0)] = _not_supported()
    response_format: Annotated[Any, _only({"type": "text"})] = _not_supported()
    modalities: Annotated[Any, _only(["text"])] = _not_supported()
    tools: Annotated[Any, _only([])] = _not_supported()
    tool_choice: Annotated[Any, _only("none", "auto")] = _not_supported()
    functions: Annotated[Any, _only([])] = _not_supported()
    function_call: Annotated[Any, _only("none", "auto")] = _not_supported()
    audio: Annotated[Any, _only()] = _not_supported()
    prediction: Annotated[Any, _only()] = _not_supported()
    web_search_options: Annotated[Any, _only()] = _not_supported()
    parallel_tool_calls: Any = _ignored()
    reasoning_effort: Any = _ignored()
    verbosity: Any = _ignored()
    metadata: Any = _ignored()
    store: Any = _ignored()
    service_tier: Any = _ignored()
    safety_identifier: Any = _ignored()
    prompt_cache_key: Any = _ignored()
    prompt_cache_retention: Any = _ignored()

    @property
    def limit(self) -> int | None:
        """Longest answer, tokens."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(_CompletionBase):
    """`POST /v1/completions`."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)] = Field(
        description="The text to go on with; a list may hold one.", examples=["2 + 3 ="]
    )
    suffix: Annotated[Any, _only("")] = _not_supported()
    echo: Annotated[Any, _only(False)] = _not_supported()
    logprobs: Annotated[Any, _only(0)] = _not_supported()
    best_of: Annotated[Any, _only(1)] = _not_supported()

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    @property
    def limit(self) -> int | None:
        """Longest answer, tokens."""
        return self.max_tokens


class PolicyVersions(Answer):
    """The policy versions that sampled an answer: two that differ when new weights came while it was sampled."""

    min: int = Field(ge=0, description="The oldest.", examples=[17])
    max: int = Field(ge=0, description="The newest.", examples=[18])


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int = Field(description="Of the prompt, with what the chat template adds.")
    completion_tokens: int = Field(description="Of the answer.")
    total_tokens: int = Field(description="Both.")


class Reply(Answer):
    """The assistant's message."""

    role: Literal["assistant"] = Field(default="assistant", description="Who speaks.")
    content: str = Field(description="The text, special tokens left out.")
    refusal: None = Field(default=None, description="Always null.")


class ChatChoice(Answer):
    """The one answer."""

    index: int = Field(default=0, description="Always 0.")
    message: Reply
    logprobs: None = Field(default=None, description="Always null.")
    finish_reason: str = Field(description="Why it ended: `stop` or `length`.", examples=["stop"])


class TextChoice(Answer):
    """The one continuation."""

    index: int = Field(default=0, description="Always 0.")
    text: str = Field(description="The text, special tokens left out.")
    logprobs: None = Field(default=None, description="Always null.")
    finish_reason: str = Field(description="Why it ended: `stop` or `length`.", examples=["stop"])


class _AnswerBase(Answer):
    """Fields of both kinds of answer."""

    id: str = Field(description="Names the answer.")
    created: int = Field(description="Unix seconds.")
    model: str = Field(description="The job's id.", examples=[EXAMPLE_JOB_ID])
    system_fingerprint: str = Field(description="`<job>@<newest version>`.", examples=[f"{EXAMPLE_JOB_ID}@18"])
    policy_version: PolicyVersions
    usage: Usage


class ChatCompletion(_AnswerBase):
    """A whole answer."""

    object: Literal["chat.completion"] = Field(default="chat.completion", description="What this is.")
    choices: list[ChatChoice]


class TextCompletion(_AnswerBase):
    """A whole continuation."""

    object: Literal["text_completion"] = Field(default="text_completion", description="What this is.")
    choices: list[TextChoice]


class Model(Answer):
    """A policy that people can talk to."""

    id: str = Field(description="The job's id.", examples=[EXAMPLE_JOB_ID])
    object: Literal["model"] = Field(default="model", description="What this is.")
    created: int = Field(description="Unix seconds of the job's submission.")
    owned_by: Literal["millrace"] = Field(default="millrace", description="Always `millrace`.")
    state: str = Field(description="The job's state.", examples=["running"])
    policy_version: int = Field(ge=0, description="The newest version.", examples=[17])


class ModelList(Answer):
    """The policies that people can talk to, newest job first."""

    object: Literal["list"] = Field(default="list", description="What this is.")
    data: list[Model]
