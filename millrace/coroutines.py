"""Coroutines of the same client: each method runs the one of `Client` or `Job` in a thread, with its signature and its docstring.

What waits for a job, or for an answer, waits on the event loop: cancelling it leaves no thread behind that waits on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from millrace.chat import ChatAnswer
from millrace.client import Client
from millrace.document import Overrides
from millrace.follower import JobEvent
from millrace.gateway import TIMEOUT_S
from millrace.job import Job
from millrace.records import JobRecord, JobState

P = ParamSpec("P")
Blocking_co = TypeVar("Blocking_co", covariant=True)
Owner = TypeVar("Owner")
Result = TypeVar("Result")
Given = TypeVar("Given")


class Twin(Protocol[Blocking_co]):
    """What stands for an object whose methods block."""

    @property
    def blocking(self) -> Blocking_co:
        """That object."""
        ...


def threaded(
    method: Callable[Concatenate[Owner, P], Result],
) -> Callable[Concatenate[Twin[Owner], P], Coroutine[Any, Any, Result]]:
    """The method as a coroutine."""

    @wraps(method)
    async def call(self: Twin[Owner], /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await asyncio.to_thread(method, self.blocking, *args, **kwargs)

    return call


def threaded_to(
    convert: Callable[[Result], Given], method: Callable[Concatenate[Owner, P], Result]
) -> Callable[Concatenate[Twin[Owner], P], Coroutine[Any, Any, Given]]:
    """The method as a coroutine whose result is converted."""

    @wraps(method)
    async def call(self: Twin[Owner], /, *args: P.args, **kwargs: P.kwargs) -> Given:
        return convert(await asyncio.to_thread(method, self.blocking, *args, **kwargs))

    return call


def updating(
    method: Callable[Concatenate[Job, P], Job],
) -> Callable[Concatenate[AsyncJob, P], Coroutine[Any, Any, AsyncJob]]:
    """The method, which returns its job, as a coroutine that does, too."""

    @wraps(method)
    async def call(self: AsyncJob, /, *args: P.args, **kwargs: P.kwargs) -> AsyncJob:
        await asyncio.to_thread(method, self.blocking, *args, **kwargs)
        return self

    return call


class AsyncJob:
    """`Job` for asyncio: what calls the gateway is a coroutine, and `follow` an asynchronous iterator."""

    def __init__(self, job: Job) -> None:
        """`AsyncClient` makes jobs."""
        self.blocking = job

    def __repr__(self) -> str:
        return f"Async{self.blocking!r}"

    @property
    def id(self) -> str:
        """The job's id."""
        return self.blocking.id

    @property
    def record(self) -> JobRecord:
        """As it was when it was read last."""
        return self.blocking.record

    @property
    def state(self) -> JobState:
        """As it was when it was read last: `refresh` reads it again."""
        return self.blocking.state

    @property
    def cause(self) -> str:
        """Why it is stalled, paused, failed or cancelled; empty otherwise."""
        return self.blocking.cause

    @property
    def has_ended(self) -> bool:
        """Whether it had ended when it was read last."""
        return self.blocking.has_ended

    async def follow(
        self, *, start: int = 1, timeout_s: float | None = None, progress: bool = False
    ) -> AsyncGenerator[JobEvent, None]:
        """As `Job.follow`."""
        with self.blocking.watch(start=start, timeout_s=timeout_s, progress=progress) as watch:
            while not watch.ended:
                for event in await asyncio.to_thread(watch.poll):
                    yield event
                await asyncio.sleep(watch.delay_s)

    async def wait(self, timeout_s: float | None = None, *, check: bool = True, progress: bool = False) -> Self:
        """As `Job.wait`."""
        async with aclosing(self.follow(timeout_s=timeout_s, progress=progress)) as events:
            async for _ in events:
                pass
        if check:
            self.blocking.checked()
        return self

    refresh = updating(Job.refresh)
    cancel = updating(Job.cancel)
    pause = updating(Job.pause)
    resume = updating(Job.resume)
    label = updating(Job.label)
    spec = threaded(Job.spec)
    metrics = threaded(Job.metrics)
    evaluations = threaded(Job.evaluations)
    samples = threaded(Job.samples)
    delete = threaded(Job.delete)

    async def resubmit(self, overrides: Overrides | None = None, tags: Sequence[str] = ()) -> AsyncJob:
        """As `Job.resubmit`."""
        return AsyncJob(await asyncio.to_thread(self.blocking.resubmit, overrides, tags))


class AsyncChatAnswer:
    """`ChatAnswer` for asyncio: `async for` gives the text in pieces. Use it as a context manager, or read it to its end."""

    def __init__(self, answer: ChatAnswer) -> None:
        """`AsyncClient.stream_chat` makes it."""
        self.blocking = answer
        self._pieces = iter(answer)
        self._thread = ThreadPoolExecutor(1, "millrace-chat")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """What has arrived."""
        return self.blocking.text

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length`; None until it is whole."""
        return self.blocking.finish_reason

    @property
    def policy_version(self) -> dict[str, int] | None:
        """`min` and `max`, the oldest and the newest version that sampled it; None until it is whole."""
        return self.blocking.policy_version

    async def __aiter__(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        try:
            while (piece := await loop.run_in_executor(self._thread, next, self._pieces, None)) is not None:
                yield piece
        finally:
            self.close()

    async def read(self) -> str:
        """The whole text, when it is there."""
        async for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Stops the answer, after the piece that is being read, and waits for nothing; closing twice is closing once."""
        try:
            self._thread.submit(self.blocking.close)
        except RuntimeError:  # it is shut down
            return
        self._thread.shutdown(wait=False)


def read_whole(
    method: Callable[Concatenate[Client, P], ChatAnswer],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, str]]:
    """The method as a coroutine that reads its answer to the end."""

    @wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> str:
        async with AsyncChatAnswer(await asyncio.to_thread(method, self.blocking, *args, **kwargs)) as answer:
            return await answer.read()

    call.__doc__ = Client.chat.__doc__
    return call


def async_jobs(jobs: list[Job]) -> list[AsyncJob]:
    """The same jobs for asyncio."""
    return [AsyncJob(job) for job in jobs]


class AsyncClient:
    """`Client` for asyncio. Use it as a context manager, or close it."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """As `Client`'s."""
        self.blocking = Client(url, token, home=home, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    submit = threaded_to(AsyncJob, Client.submit)
    sweep = threaded_to(async_jobs, Client.sweep)
    job = threaded_to(AsyncJob, Client.job)
    jobs = threaded_to(async_jobs, Client.jobs)
    check = threaded(Client.check)
    compare = threaded(Client.compare)
    chat = read_whole(Client.stream_chat)
    stream_chat = threaded_to(AsyncChatAnswer, Client.stream_chat)
    close = threaded(Client.close)
