"""Python client of Millrace: `Client` for programs and notebooks, `AsyncClient` for asyncio (docs/python.md).

client, job, coroutines   what people use: a gateway, a job, both as coroutines
follower, chat, frames    what a job does, as events, as text, and as DataFrames; progress: its bar
document, connection      a job to submit, and the gateway that is meant where none is named
gateway, records          the HTTP API path by path, which the command line is built on, too; its types
"""

from millrace.chat import ChatAnswer
from millrace.client import Client
from millrace.coroutines import AsyncChatAnswer, AsyncClient, AsyncJob
from millrace.follower import Evaluated, JobEvent, StateChanged, StepTrained
from millrace.frames import MissingPackageError
from millrace.gateway import GatewayError
from millrace.job import Job, JobFailedError
from millrace.records import JobRecord, JobState, SampleFilters
from services.common.errors import ConfigError, DeadlineExceeded, MillraceError

__all__ = [
    "AsyncChatAnswer",
    "AsyncClient",
    "AsyncJob",
    "ChatAnswer",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "Evaluated",
    "GatewayError",
    "Job",
    "JobEvent",
    "JobFailedError",
    "JobRecord",
    "JobState",
    "MillraceError",
    "MissingPackageError",
    "SampleFilters",
    "StateChanged",
    "StepTrained",
]
