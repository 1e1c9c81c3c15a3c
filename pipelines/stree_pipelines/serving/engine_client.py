"""The other end: what the process that speaks HTTP knows of the engine's process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from stree.batching.sequences import Request
from stree.common.errors import InvariantBroken
from stree_pipelines.serving.grammar import AskedGrammar
from stree_pipelines.serving.messages import SIZE, Call, Facts, Gain, Result, packed, unpacked

Listener = Callable[[Gain], object]
_READ_AHEAD = 2**20  # bytes of messages that wait here before they wait in the socket


class EngineClient:
    """Submits requests to the engine's process, and hands out what its steps give.

    Args:
        link: The socket to it.
        facts: The message with which the engine begins.

    Attributes:
        is_alive: False once the engine's process has closed its end.
        on_end: Called when it does so by itself.
    """

    def __init__(self, link: socket.socket, facts: Facts) -> None:
        self.facts, self.is_alive, self._link = facts, True, link
        self.on_end: Callable[[], object] = lambda: None
        self._listeners: dict[int, Listener] = {}
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter

    @property
    def num_running(self) -> int:
        """Number of answers that have rows."""
        return min(len(self._listeners), self.facts.num_rows)

    @property
    def num_waiting(self) -> int:
        """Number of answers that wait for rows."""
        return len(self._listeners) - self.num_running

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Hear the engine inside the block; after it the engine's process ends."""
        reader, self._writer = await asyncio.open_unix_connection(
            sock=self._link, limit=_READ_AHEAD
        )
        hearing = asyncio.create_task(self._hear(reader))
        try:
            yield
        finally:
            hearing.cancel()
            self._writer.close()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Hand out messages as they come; all that are there, before anybody acts on one."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readexactly(SIZE.size)
                self._take(unpacked(await reader.readexactly(SIZE.unpack(head)[0])))
        self.is_alive = False
        for number in list(self._listeners):
            self._take([(number, [], 0, "error", (), None, str(_ended()))])
        for number in list(self._results):
            self._take(Result(number, error=_ended()))
        self.on_end()

    def _take(self, message: Any) -> None:
        if isinstance(message, Result):
            future = self._results.pop(message.number, None)
            if future is None or future.done():
                return  # nobody waits for it
            if message.error is None:
                future.set_result(message.value)
            else:
                future.set_exception(message.error)
            return
        listeners = self._listeners
        for each in message:
            gain = Gain(*each)
            if (listener := listeners.get(gain.answer)) is None:
                continue  # it was cancelled
            if gain.finish_reason:
                del listeners[gain.answer]
            listener(gain)

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of `EngineEnd`; return its result or raise its error."""
        if not self.is_alive:
            raise _ended()
        number = next(self._numbers)
        self._results[number] = future = asyncio.get_running_loop().create_future()
        self._writer.write(packed(Call(number, name, arguments)))
        return await future

    async def submit(
        self, prompts: Sequence[tuple[Request, AskedGrammar | None]], listeners: Sequence[Listener]
    ) -> list[int]:
        """Submit prompts, and return the numbers of their answers, each of which has a listener.

        None is under way if one of them is refused. Raises what `Engine.submit` raises.
        """
        numbers = [next(self._numbers) for _ in listeners]
        self._listeners.update(zip(numbers, listeners, strict=True))
        try:
            await self.call("submit", numbers, prompts)
        except BaseException:
            self.cancel(numbers)
            raise
        return numbers

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel those of the answers that are under way; nothing more is heard of them."""
        under_way = [each for each in numbers if self._listeners.pop(each, None) is not None]
        if under_way and self.is_alive:
            self._writer.write(packed(Call(next(self._numbers), "cancel", (under_way,))))


def _ended() -> InvariantBroken:
    return InvariantBroken("the engine's process has ended: start the server again")
