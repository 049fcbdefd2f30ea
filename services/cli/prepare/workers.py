"""Workers that convert chunks: this process alone, or several, which take turns so that results come in the order of the chunks.

chunk n ──► worker n mod N ──► its result, before the worker gets chunk n + N
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgpack

from services.cli.prepare.convert import Converted, Converter
from services.cli.prepare.raw import Chunk, Form
from services.cli.prepare.settings import PrepareSettings
from services.common.data.bounds import DataBounds
from services.common.errors import DataError

_END_S = 5.0
"""In which a worker ends by itself."""


def convert_all(
    chunks: Iterable[Chunk], settings: PrepareSettings, bounds: DataBounds
) -> Iterator[tuple[Chunk, list[Converted]]]:
    """Each chunk with its converted rows, in order. Raises DataError when a worker process dies."""
    converter = Converter(settings, bounds)  # wrong settings are an error of this process, before any other starts
    if settings.workers == 1:
        yield from ((chunk, converter.convert(chunk)) for chunk in chunks)
        return
    workers = [_Worker(settings, bounds) for _ in range(settings.workers)]
    try:
        waiting: deque[tuple[Chunk, _Worker]] = deque()
        for number, chunk in enumerate(chunks):
            if len(waiting) == len(workers):
                done, worker = waiting.popleft()
                result = worker.receive(done)
                worker = _sent(chunk, worker)
                waiting.append((chunk, worker))
                yield done, result
            else:
                waiting.append((chunk, _sent(chunk, workers[number])))
        while waiting:
            done, worker = waiting.popleft()
            yield done, worker.receive(done)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """One process with a converter."""

    def __init__(self, settings: PrepareSettings, bounds: DataBounds) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        arguments = there, settings.model_dump_json(), asdict(bounds)
        self._process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        there.close()

    def send(self, chunk: Chunk) -> None:
        """Sends the next chunk; the worker has sent the result of the last."""
        message = chunk.file, chunk.numbers, chunk.rows, chunk.form
        try:
            self._here.send_bytes(msgpack.packb(message))
        except OSError as error:
            raise self._lost(chunk) from error

    def receive(self, chunk: Chunk) -> list[Converted]:
        """The result of this chunk, which was sent last."""
        try:
            result = msgpack.unpackb(self._here.recv_bytes(), unicode_errors="surrogatepass")
        except (EOFError, OSError) as error:
            raise self._lost(chunk) from error
        return [Converted(*row) for row in result]

    def end(self) -> None:
        """Ends the process."""
        self._here.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _lost(self, chunk: Chunk) -> DataError:
        self._process.join(_END_S)
        rows = f"{chunk.file}: rows {chunk.numbers[0]} to {chunk.numbers[-1]}"
        return DataError(f"{rows}: the worker process ended with {self._process.exitcode}", field="input")


def block_torch() -> None:
    """Makes torch look as if it were not installed, for good: tokenizers need none, and importing it takes seconds and 250 MB."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


def _sent(chunk: Chunk, worker: _Worker) -> _Worker:
    worker.send(chunk)
    return worker


def _work(pipe: Connection, settings: str, bounds: dict[str, int]) -> None:
    """Converts chunks until the pipe is closed. Ctrl-C ends the process that reads the results, and so this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    block_torch()
    converter = Converter(PrepareSettings.model_validate_json(settings), DataBounds(**bounds))
    while True:
        try:
            file, numbers, rows, form = msgpack.unpackb(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        made = converter.convert(Chunk(file, numbers, rows, Form(form), 0))
        pipe.send_bytes(msgpack.packb(made, unicode_errors="surrogatepass"))
