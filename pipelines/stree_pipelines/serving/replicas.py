"""Replicas of the server on Ray Serve: one a GPU, and an entrance that sends requests to them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import ray
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)

from stree.common.errors import InvariantBroken, UsageError
from stree_pipelines.serving.app import Refused, Server, make_app, read_body
from stree_pipelines.serving.statistics import METRICS_TYPE, merged

Loaded = Callable[[Namespace], AbstractContextManager[tuple[Server, Any]]]
Message = dict[str, Any]  # of ASGI
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
NUM_TRIES = 5  # replicas that a request is sent to, each after the death of the one before
RETRY_S = 0.5  # before another try, in which the death becomes known
PREFIX_CHARACTERS = 4096  # of a prompt's beginning, by which its replica is found
DRAIN_S = 600.0  # at most, in which a replica that is to stop ends its answers
_NOT_PASSED_ON = {b"host", b"content-length", b"transfer-encoding", b"connection"}


def serve_replicas(options: Namespace, loaded: Loaded) -> None:
    """Serve by replicas until a signal ends it, on a Ray cluster that is there or on this machine.

    Args:
        options: Of `stree serve`. Its `replicas` are there at once; under load there are up to
            `max_replicas`.
        loaded: Loads the models and returns what speaks to them; called in each replica.

    Raises `UsageError` for numbers out of range, and `InvariantBroken` if the replicas do not
    start.
    """
    least = 1 if options.replicas is None else options.replicas
    most = options.max_replicas or least
    if not 1 <= least <= most or options.port == 0:
        raise UsageError(
            f"--replicas is {least}, --max_replicas {most} and --port {options.port}, wanted at "
            "least 1 replica, as many at most, and a port"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if Path(options.target).is_dir():
        options.target = str(Path(options.target).resolve())
    if options.drafter and Path(options.drafter).is_dir():
        options.drafter = str(Path(options.drafter).resolve())
    try:
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray has no class of its own for it
        raise InvariantBroken(f"Ray did not start: {error}") from error
    on_gpus = options.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    replica = serve.deployment(
        name="Replica",
        ray_actor_options={"num_gpus": 1} if on_gpus else {"num_cpus": 1},
        max_ongoing_requests=2 * options.num_rows,  # beyond it another replica is asked
        max_queued_requests=options.max_waiting,
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=DRAIN_S,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        autoscaling_config={
            "min_replicas": least, "max_replicas": most, "initial_replicas": least,
            "target_ongoing_requests": options.num_rows,
        },
    )(Replica)
    entrance = serve.deployment(
        name="Entrance", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000,
        graceful_shutdown_timeout_s=DRAIN_S,
    )(Entrance)
    name = options.served_model_name or Path(options.target).name
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    try:
        serve.start(
            http_options={"host": options.host, "port": options.port},
            logging_config={"enable_access_log": False},
        )
        try:
            serve.run(entrance.bind(replica.bind(options, loaded)))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise InvariantBroken(f"the replicas did not start: {reason}") from error
        host, port = options.host, options.port
        print(
            f"{name} is served by {least} replicas at http://{host}:{port}/v1, a page to chat at "
            f"http://{host}:{port}", flush=True,
        )
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


class Replica:
    """The application of one server in a process of Ray's, with an engine's process beside it."""

    def __init__(self, options: Namespace, loaded: Loaded) -> None:
        self._open = ExitStack()
        self._server, _ = self._open.enter_context(loaded(options))
        self._app = make_app(self._server)
        self._connected: asyncio.Task[AsyncExitStack] | None = None

    def check_health(self) -> None:
        """Raise an error once the engine's process has ended: Ray starts another replica then."""
        if not self._server.engine.is_alive:
            raise InvariantBroken("the engine's process has ended")

    def metrics(self) -> tuple[str, str]:
        """Return the replica's name in Ray and its metrics as Prometheus reads them."""
        name: str = serve.get_replica_context().replica_id.unique_id
        return name, self._server.statistics.text().decode()

    async def _connect(self) -> AsyncExitStack:
        stack = AsyncExitStack()
        await stack.enter_async_context(self._server.engine.connected())
        self._server.engine.on_end = lambda: os._exit(1)  # callers ask another replica then
        return stack

    async def respond(self, scope: Message, body: bytes) -> AsyncIterator[Message]:
        """Yield the application's answer to a request, as ASGI's messages."""
        if self._connected is None:
            self._connected = asyncio.create_task(self._connect())
        await asyncio.shield(self._connected)
        given: list[Message] = [{"type": "http.request", "body": body}]
        sent: asyncio.Queue[Any] = asyncio.Queue()  # messages; None at the end

        async def receive() -> Message:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # the task is cancelled when the client goes away
            raise AssertionError

        async def run() -> None:
            try:
                await self._app(scope, receive, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()


class Entrance:
    """Sends each request to the replica of its prefix, and to another one where that has died.

    Args:
        replicas: Handle of the replicas.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: HttpRequest) -> Response:
        """Answer a request over HTTP."""
        try:
            body = await read_body(request)
            if (request.method, request.url.path) == ("GET", "/metrics"):
                return await self._metrics()
            return await self._answer(request, body)
        except Refused as error:
            return error.response()

    async def _metrics(self) -> Response:
        """Answer with the metrics of all replicas, each with its name as the label `replica`."""
        try:
            texts = await self._replicas.broadcast("metrics").results_async()
        except (RayActorError, RayTaskError, RayServeException) as error:
            raise Refused(503, f"a replica gives no metrics: {error}") from None
        return Response(merged(dict(texts)), media_type=METRICS_TYPE)

    async def _answer(self, request: HttpRequest, body: bytes) -> Response:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": request.method, "path": request.url.path, "root_path": "",
            "raw_path": request.url.path.encode(), "query_string": request.url.query.encode(),
            "headers": [each for each in request.headers.raw if each[0] not in _NOT_PASSED_ON],
        }
        handle = self._replicas.options(stream=True, session_id=session_of(body))
        for left in reversed(range(NUM_TRIES)):
            try:
                messages = aiter(handle.respond.remote(scope, body))
                start = await anext(messages)
                headers = {name.decode(): value.decode() for name, value in start["headers"]}
                if headers.get("content-type", "").startswith("text/event-stream"):
                    return StreamingResponse(_events(messages), start["status"], headers)
                whole = b"".join([each.get("body", b"") async for each in messages])
                return Response(whole, start["status"], headers)
            except BackPressureError as error:
                raise Refused(429, f"too many requests wait: {error}") from None
            except RayTaskError as error:
                raise Refused(500, f"the replica has failed: {error.cause}") from None
            except (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError) as error:
                if not left:
                    raise Refused(503, f"no replica answers: {error}") from None
                await asyncio.sleep(RETRY_S)
        raise AssertionError


async def _events(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error and its end if its replica dies."""
    try:
        async for message in messages:
            yield message.get("body", b"")
    except (RayActorError, RayTaskError, RayServeException):
        error = Refused(500, "the replica of this answer has ended: ask again").body()
        yield f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()


def session_of(body: bytes) -> str:
    """Return a key of a prompt's beginning: up to the first question of a chat; "" for none.

    All requests of one conversation have the same, so that one replica keeps its prefixes.
    """
    try:
        asked = json.loads(body)
        messages, prompt = asked.get("messages"), asked.get("prompt")
    except (ValueError, AttributeError, RecursionError):
        return ""
    if isinstance(messages, list):
        roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
        prompt = messages[: roles.index("user") + 1] if "user" in roles else messages[:1]
    if prompt is None:
        return ""
    return hashlib.sha256(json.dumps(prompt)[:PREFIX_CHARACTERS].encode()).hexdigest()
