"""Engine: serve requests of many threads with one batch decoder, in a thread of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Condition, Event, Thread, current_thread
from typing import Any, Self, TypeVar

from stree.common.threads import for_decoding

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.common.errors import QueueFull, UsageError, error_of_request
from stree.engine.sequence import StepOutput
from stree.generation import DecodingStats, GenerationOutput

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Listener = Callable[[list[tuple["Handle", StepOutput]]], object]


class Handle:
    """A request's answer as it comes; any thread may read it.

    Iterate over it for the reports of the steps that gave it tokens, or call `result` for the whole
    answer. Its last report has a finish_reason: the decoder's, "released" after `Engine.cancel`, or
    "error".

    Attributes:
        request: The request.
        tag: The caller's own name of it.
        output: The answer with its statistics so far; all of it once it has ended, tokens that came
            before an error or a cancellation included.
        error: What ended it, None if nothing went wrong.
    """

    def __init__(self, request: Request, tag: Any = None, is_heard: bool = False) -> None:
        self.request, self.tag = request, tag
        self.output = GenerationOutput([], "", DecodingStats(tree_max_depth=0), None)
        self.error: Exception | None = None
        self._reports: SimpleQueue[StepOutput] | None = None if is_heard else SimpleQueue()
        self._ended = Event()

    @property
    def has_ended(self) -> bool:
        """True once the last report has come."""
        return self._ended.is_set()

    def __iter__(self) -> Iterator[StepOutput]:
        """Yield its reports as they come, once each; raise `error` at its end.

        Raises `UsageError` if the engine has a listener, which hears them.
        """
        if self._reports is None:
            raise UsageError("the engine's listener hears the reports: wait for the result")
        while not (self.has_ended and self._reports.empty()):
            report = self._reports.get()
            if report.error is None:
                yield report
            if report.finish_reason:
                break
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for its end, and return `output`.

        Args:
            timeout: Seconds; None waits as long as it takes.

        Raises:
            TimeoutError: When it has not ended by then; it goes on.
            Exception: Its `error`.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"no answer after {timeout} s: wait longer, or cancel the request")
        if self.error is not None:
            raise self.error
        return self.output

    def _tell(self, report: StepOutput) -> None:
        if self._reports is not None:
            self._reports.put(report)
        if report.finish_reason:
            self._ended.set()


class Engine:
    """Serves requests that any thread submits, as they come, with a batch decoder.

    One thread steps the decoder while there is work, and sleeps while there is none. Requests get
    rows in the order in which they came. What goes wrong with one ends its handle alone.

    Args:
        decoder: All its rows are the engine's until `close`.
        max_waiting: The most requests that wait for a row; None for any number.
        listener: Called once a step, by the engine's thread, with the reports that the step gave,
            each with its handle; the thread waits for its return. Handles keep no reports then.

    Raises:
        UsageError: When rows of the decoder are taken.

    Example:
        >>> import stree
        >>> sizes = dict(attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8)
        >>> config = stree.HybridConfig(64, d_model=16, num_layers=1, **sizes)
        >>> batch = stree.BatchDecoder(stree.HybridModel(config), num_rows=2, max_length=64)
        >>> settings = stree.GenerationConfig(max_new_tokens=4)
        >>> with stree.Engine(batch) as engine:
        ...     handles = [engine.submit(stree.Request([5, each], settings)) for each in range(3)]
        ...     print([len(each.result().tokens) for each in handles])
        [4, 4, 4]
    """

    def __init__(
        self, decoder: BatchDecoder, max_waiting: int | None = None,
        listener: Listener | None = None,
    ) -> None:
        decoder.require_free()
        self.decoder, self.max_waiting, self.listener = decoder, max_waiting, listener
        self._told: list[tuple[Handle, StepOutput]] = []  # what the listener has not heard yet
        self._running: dict[int, Handle] = {}  # by row
        self._changed = Condition()  # guards what follows; told of every request and cancellation
        self._waiting: deque[Handle] = deque()
        self._cancelled: set[Handle] = set()
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_closed = self._is_stopped = False
        self._thread = Thread(target=self._run, name="stree-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """True while its thread serves: until `close`, or until it cannot go on after an error."""
        return self._thread.is_alive() and self.decoder.loop.failure is None

    @property
    def num_running(self) -> int:
        """Number of requests that have rows."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for rows."""
        return len(self._waiting)

    def submit(self, request: Request, tag: Any = None) -> Handle:
        """Let a request wait for a row, and return its handle at once.

        Args:
            request: For one answer: of several (`num_return_sequences`), submit each of
                `stree.batching.sequences.samples_of`; they share the prompt.
            tag: Kept on the handle, for a listener.

        Raises:
            UsageError: For a request that cannot be served (`BatchDecoder.check`), and after
                `close`.
            InvariantBroken: When the engine cannot go on after an error, which it names.
            QueueFull: When `max_waiting` requests wait.
        """
        self.decoder.check(request)
        handle = Handle(request, tag, is_heard=self.listener is not None)
        with self._changed:
            self._require_open()
            if self.max_waiting is not None:
                room = self.max_waiting + self.decoder.num_free_rows
                if len(self._waiting) >= room and self._num_to_serve() >= room:
                    raise QueueFull(
                        f"{self._num_to_serve()} requests wait for a row, wanted at most "
                        f"{self.max_waiting}: ask again later"
                    )
            self._waiting.append(handle)
            self._changed.notify_all()
        return handle

    def _num_to_serve(self) -> int:
        """Return the number of waiting requests without those cancelled since the last step."""
        return sum(each not in self._cancelled for each in self._waiting)

    def cancel(self, handle: Handle) -> None:
        """End a request: its row is free before the next step. Nothing happens after its end."""
        with self._changed:
            if not handle.has_ended:
                self._cancelled.add(handle)
                self._changed.notify_all()

    def call(self, task: Callable[[], T]) -> Future[T]:
        """Let the engine's thread call a function of the models between two steps.

        Raises as `submit` does.
        """
        future: Future[T] = Future()
        with self._changed:
            self._require_open()
            self._tasks.append((future, task))
            self._changed.notify_all()
        return future

    def _require_open(self) -> None:
        self.decoder.require_working()
        if self._is_closed:
            raise UsageError("the engine is closed, and takes no more requests: make another")

    def close(self, drain: bool = True) -> None:
        """Take no more requests, and end the thread; the decoder's rows are free again then.

        Args:
            drain: Whether to wait for all answers; otherwise they are cancelled.
        """
        with self._changed:
            self._is_closed, self._is_stopped = True, self._is_stopped or not drain
            self._changed.notify_all()
        if self._thread is not current_thread():
            self._thread.join()

    # The engine's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            LOG.exception("the engine has failed, and ends")
            self._end_all(error_of_request(error))

    def _serve(self) -> None:
        while self._has_work():
            try:
                self._end_cancelled()
                self._call_tasks()
                self._admit()
                for report in self.decoder.step():
                    if report.finish_reason:
                        self._end(report)
                    else:
                        self._tell(self._running[report.row], report)
            except BaseException as error:  # of nobody in particular, so of all
                LOG.exception("a step of the engine has failed")
                for row in list(self._running):
                    self._end(StepOutput(row, [], "error", error=error_of_request(error)))
            self._call_listener()

    def _tell(self, handle: Handle, report: StepOutput) -> None:
        if report.finish_reason or self.listener is None:
            handle._tell(report)
        if self.listener is not None:
            self._told.append((handle, report))

    def _call_listener(self) -> None:
        told, self._told = self._told, []
        if told and self.listener is not None:
            try:
                self.listener(told)
            except BaseException:  # the answers go on
                LOG.exception("the listener of an engine has failed")

    def _has_work(self) -> bool:
        """Wait until there is work; return False once the engine is closed and has none."""
        if self._running:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_any())
            return self._has_any()

    def _has_any(self) -> bool:
        return bool(self._waiting or self._running or self._cancelled or self._tasks)

    def _call_tasks(self) -> None:
        while self._tasks:
            future, task = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with for_decoding(self.decoder.target):
                    future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

    def _end_cancelled(self) -> None:
        if not (self._cancelled or self._is_stopped):
            return
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            if self._is_stopped:
                cancelled = {*self._waiting, *self._running.values()}
            unserved = [each for each in self._waiting if each in cancelled]
            for handle in unserved:
                self._waiting.remove(handle)
        for handle in unserved:
            handle.output.finish_reason = "released"
            self._tell(handle, StepOutput(-1, [], "released"))
        for row in [each for each, handle in self._running.items() if handle in cancelled]:
            self._end(StepOutput(row, [], "released"))

    def _admit(self) -> None:
        while self._waiting and self.decoder.num_free_rows:
            with self._changed:
                handle = self._waiting.popleft()
            try:
                self._running[self.decoder.admit(handle.request)] = handle
            except BaseException as error:
                self._fail(handle, error_of_request(error))

    def _end(self, report: StepOutput) -> None:
        """Free a request's row, and tell its handle that it has ended."""
        handle = self._running[report.row]
        keep = handle.request.keep_prompt
        handle.output, handle.error = self.decoder.release(report.row, keep), report.error
        del self._running[report.row]
        self._tell(handle, report)

    def _fail(self, handle: Handle, error: Exception) -> None:
        """Tell a handle without a row that it has ended."""
        handle.error = error
        self._tell(handle, StepOutput(-1, [], "error", error=error))

    def _end_all(self, error: Exception) -> None:
        """End all handles and tasks as the thread ends; rows stay taken."""
        with self._changed:
            self._is_closed, self.decoder.loop.failure = True, error
            handles = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for handle in handles:
            self._fail(handle, error)
        for future, _ in self._tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._call_listener()
