from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromPolicy(_message.Message):
    __slots__ = ("begin", "reply")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    reply: Reply
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("environment", "config", "task", "seed", "limits")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    environment: str
    config: str
    task: str
    seed: int
    limits: Limits
    def __init__(self, environment: _Optional[str] = ..., config: _Optional[str] = ..., task: _Optional[str] = ..., seed: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("queue_s", "step_timeout_s", "reply_timeout_s", "max_observation_chars")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REPLY_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_OBSERVATION_CHARS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    step_timeout_s: float
    reply_timeout_s: float
    max_observation_chars: int
    def __init__(self, queue_s: _Optional[float] = ..., step_timeout_s: _Optional[float] = ..., reply_timeout_s: _Optional[float] = ..., max_observation_chars: _Optional[int] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("turn", "text")
    TURN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    turn: int
    text: str
    def __init__(self, turn: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class FromWorld(_message.Message):
    __slots__ = ("observed", "failed")
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    observed: Observed
    failed: Failed
    def __init__(self, observed: _Optional[_Union[Observed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Observed(_message.Message):
    __slots__ = ("messages", "done", "reward", "accuracy", "detail")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    done: bool
    reward: float
    accuracy: float
    detail: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., done: _Optional[bool] = ..., reward: _Optional[float] = ..., accuracy: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("reason", "detail", "permanent")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PERMANENT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    permanent: bool
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ..., permanent: _Optional[bool] = ...) -> None: ...
