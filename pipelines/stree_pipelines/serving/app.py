"""OpenAI's API over an engine: routes, streams and errors."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

import stree
from stree.common.errors import QueueFull, StreeError, UsageError
from stree_pipelines.serving.answers import (
    Answer,
    Delta,
    chat_logprobs,
    completion_logprobs,
)
from stree_pipelines.serving.asked import Asked, Asker
from stree_pipelines.serving.engine_client import EngineClient
from stree_pipelines.serving.messages import Gain
from stree_pipelines.serving.schemas import Body, ChatBody, CompletionBody
from stree_pipelines.serving.statistics import METRICS_TYPE, Statistics, usage_of

LARGEST_BODY = 8 * 2**20  # bytes
SMALL_BODY = 2**13  # bytes of a body that is worked on at once, which takes less than a thread
SLOWEST_BODY_S = 30.0
RETRY_AFTER_S = 1
EVENT_GAP_S = 0.004  # least time between two events of a stream; faster steps share one
_KINDS = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error",
          429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
B = TypeVar("B", bound=Body)


class Refused(Exception):
    """An answer with an error, in the API's form."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, fallback)
        return {"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.status,
        }}


class Server:
    """The engine and its model behind the routes.

    Args:
        engine: The engine's process.
        name: Of the model, as requests name it.
        api_key: That requests to /v1 bring; None for none.
        timeout_s: Seconds after which an answer is given up; None for no limit.
    """

    def __init__(
        self, engine: EngineClient, name: str, api_key: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.engine, self.name, self.api_key, self.timeout_s = engine, name, api_key, timeout_s
        self.tokenizer, self.asker = engine.facts.tokenizer, Asker(engine.facts)
        self.statistics = Statistics(engine, name)
        self.created = int(time.time())
        self.is_draining = False

    def require_key(self, request: HttpRequest) -> None:
        """Raise `Refused` for a request without the key."""
        if self.api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(given.encode(), self.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Refused(401, "the API key is wrong or missing: send Authorization: Bearer KEY")

    async def body(self, request: HttpRequest, kind: type[B]) -> B:
        """Read and check a body. Raises `Refused`."""
        self.require_key(request)
        try:
            raw = await asyncio.wait_for(read_body(request), SLOWEST_BODY_S)
        except TimeoutError:
            raise Refused(408, f"the body did not come within {SLOWEST_BODY_S:.0f} s") from None
        except ClientDisconnect:
            raise Refused(400, "the connection was closed before all of the body came") from None
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            got = f", got {first['input']!r:.60}" if where else ""
            raise Refused(400, f"{where or 'the body'}: {first['msg']}{got}", where) from None
        is_free = body.response_format is None and body.guided_regex is None
        request.state.is_small = is_free and len(raw) < SMALL_BODY
        if body.model is not None:
            self.require_name(body.model)
        return body

    def require_name(self, model: str) -> None:
        """Raise `Refused` for another model's name."""
        if model != self.name:
            raise Refused(
                404, f"there is no model {model!r:.80}: this server has {self.name!r}", "model"
            )

    def card(self) -> dict[str, Any]:
        """Return what /v1/models tells of the model."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "stree",
            "max_model_len": self.engine.facts.max_length,
        }


async def read_body(request: HttpRequest) -> bytes:
    """Return a request's body. Raises `Refused` for one of more than `LARGEST_BODY`."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise Refused(413, f"the body has more than {LARGEST_BODY} bytes: shorten it")
        parts.append(part)
    return b"".join(parts)


class Reply:
    """The reply to one request: choices of one or several prompts, whole or streamed."""

    def __init__(self, server: Server, body: Body, asked: list[Asked]) -> None:
        self.server, self.body, self.asked = server, body, asked
        self.is_chat = isinstance(body, ChatBody)
        self.answers = [
            Answer(index, each, server.tokenizer)
            for index, each in enumerate(
                each for each in asked for _ in range(each.request.generation.num_return_sequences)
            )
        ]
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.frame: dict[str, Any] = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": int(time.time()), "model": server.name,
        }
        self.timeout_s = min(
            (each for each in (body.timeout_s, server.timeout_s) if each is not None), default=None
        )
        self._echoes: dict[int, dict[str, Any]] = {}  # of prompts, by their places
        self._numbers: list[int] = []  # the engine's, of the answers
        self._pending: list[tuple[Answer, Gain]] = []
        self._news = asyncio.Event()
        self._quiet_until, self._timer = 0.0, False  # by the loop's clock; whether one runs to it

    async def submit(self) -> None:
        """Let the engine accept the requests; a stream begins only afterwards.

        Raises `UsageError` and `QueueFull`; none is under way then.
        """
        if self.asked[0].wants_none:
            await self.server.engine.call("check", [each.request for each in self.asked])
            return
        prompts = [(each.request, each.grammar) for each in self.asked]
        listeners = [partial(self._hear, each) for each in self.answers]
        self._numbers = await self.server.engine.submit(prompts, listeners)

    def _hear(self, answer: Answer, gain: Gain) -> None:
        self._pending.append((answer, gain))
        if gain.tokens:
            self.server.statistics.note_tokens(answer.moments, len(gain.tokens))
        if gain.finish_reason:
            self._news.set()
        elif self.body.stream and not self._timer:
            self._timer = True
            asyncio.get_running_loop().call_at(self._quiet_until, self._wake)

    def _wake(self) -> None:
        self._timer = False
        self._news.set()

    async def _deltas(self) -> AsyncIterator[list[tuple[Answer, Delta]]]:
        """Yield what answers have gained since the last time, to the end of all.

        Leaving the iteration cancels them. Raises `Refused` for what goes wrong.
        """
        timeout_s, left = self.timeout_s, len(self._numbers)
        ends = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        try:
            while left:
                try:
                    async with asyncio.timeout_at(ends):
                        await self._news.wait()
                except TimeoutError:
                    raise Refused(504, f"no answer within {timeout_s:g} s") from None
                self._news.clear()
                self._quiet_until = asyncio.get_running_loop().time() + EVENT_GAP_S
                pending, self._pending = self._pending, []
                gained: dict[int, list[Gain]] = {}
                for answer, gain in pending:
                    gained.setdefault(answer.index, []).append(gain)
                deltas = [(self.answers[at], self.answers[at].take(gained[at])) for at in gained]
                for answer, _ in deltas:
                    last = gained[answer.index][-1]
                    if last.finish_reason:
                        left -= 1
                        self.server.statistics.note_end(
                            answer.output, len(answer.asked.prompt), answer.moments
                        )
                    if last.error:
                        raise Refused(500, f"the answer has failed: {last.error}")
                yield deltas
        finally:
            self.server.engine.cancel(self._numbers)

    def usage(self) -> dict[str, Any]:
        """Return the usage of the answers, which have ended."""
        prompts = [len(each.prompt) for each in self.asked]
        return usage_of(prompts, [each.output for each in self.answers])

    async def whole(self) -> dict[str, Any]:
        """Return the reply once all answers have ended."""
        await self._echo()
        gained = {answer.index: Delta() for answer in self.answers}
        async for deltas in self._deltas():
            for answer, delta in deltas:
                gained[answer.index] += delta
        choices = [self._choice(each, gained[each.index]) for each in self.answers]
        return {**self.frame, "choices": choices, "usage": self.usage()}

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        options, kind = self.body.stream_options, ".chunk" if self.is_chat else ""
        frame = {**self.frame, "object": f"{self.frame['object']}{kind}"}
        if options is not None and options.include_usage:
            frame["usage"] = None

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {_json({**frame, 'choices': choices, **more})}\n\n"

        try:
            await self._echo()
            for answer in self.answers if self.is_chat else ():
                role = {"role": "assistant", "content": ""}
                choice = {"index": answer.index, "delta": role, "finish_reason": None}
                yield event([choice])
            held = {answer.index: Delta() for answer in self.answers}
            for answer in self.answers if self.body.echo else ():
                yield event([self._choice(answer, Delta(), streams=True)])
            async for deltas in self._deltas():
                events = []
                for answer, delta in deltas:
                    held[answer.index] += delta
                    if held[answer.index]:
                        events.append(event([self._choice(answer, held[answer.index], True)]))
                        held[answer.index] = Delta()
                if events:
                    yield "".join(events)
            if options is not None and options.include_usage:
                yield event([], usage=self.usage())
        except Refused as error:  # the status is sent already
            yield f"data: {_json(error.body())}\n\n"
        except StreeError as error:
            yield f"data: {_json(_refusal_of(error).body())}\n\n"
        yield "data: [DONE]\n\n"

    async def _echo(self) -> None:
        """Work out the log-probabilities of prompts that are given back."""
        if not self.body.echo:
            return
        assert isinstance(self.body, CompletionBody)
        num_top = self.body.num_logprobs
        for place, asked in enumerate(self.asked):
            text = self.server.tokenizer.decode(asked.prompt, skip_special_tokens=True)
            echo: dict[str, Any] = {"text": text}
            if num_top is not None:
                echo["tokens"] = await self.server.engine.call("log_probs", asked.prompt, num_top)
            self._echoes[place] = echo

    def _choice(self, answer: Answer, delta: Delta, streams: bool = False) -> dict[str, Any]:
        body, server = self.body, self.server
        choice: dict[str, Any] = {"index": answer.index}
        if self.is_chat:
            message: dict[str, Any] = {}
            if delta.content or not streams:
                message["content"] = delta.content or (None if delta.calls else "")
            if delta.reasoning:
                message["reasoning_content"] = delta.reasoning
            if delta.calls:
                message["tool_calls"] = delta.calls if streams else [
                    {key: value for key, value in call.items() if key != "index"}
                    for call in delta.calls
                ]
            choice["delta" if streams else "message"] = (
                message if streams else {"role": "assistant", **message}
            )
            choice["logprobs"] = (
                chat_logprobs(server.tokenizer, delta.logprobs) if delta.logprobs else None
            )
        else:
            self._add_text(choice, answer, delta, streams)
        choice["finish_reason"] = delta.finish_reason
        if answer.asked.wants_none and not streams:
            choice["finish_reason"] = "length"
        if body.return_token_ids:
            choice["token_ids"] = delta.tokens
            if not streams:
                choice["prompt_token_ids"] = answer.asked.prompt
        if body.return_drafts:
            choice["drafts"] = [
                {"text": text, "accepted": accepted} for text, accepted in delta.drafts if text
            ]
        return choice

    def _add_text(
        self, choice: dict[str, Any], answer: Answer, delta: Delta, streams: bool
    ) -> None:
        body, tokenizer = self.body, self.server.tokenizer
        assert isinstance(body, CompletionBody)
        is_echo = body.echo and not (streams and delta)
        echo = self._echoes[self.asked.index(answer.asked)] if is_echo else None
        choice["text"] = ("" if echo is None else echo["text"]) + delta.content
        choice["logprobs"] = None
        if body.logprobs is not None:
            first = [] if echo is None else answer.asked.prompt[:1]
            tokens = ([] if echo is None else echo["tokens"]) + delta.logprobs
            offset = answer.num_named_characters
            named = completion_logprobs(tokenizer, first, tokens, offset)
            answer.num_named_characters += sum(map(len, named["tokens"]))
            choice["logprobs"] = named


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _refusal_of(error: StreeError) -> Refused:
    if isinstance(error, QueueFull):
        return Refused(429, str(error))
    return Refused(400 if isinstance(error, UsageError) else 500, str(error))


def make_app(server: Server) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with server.engine.connected():
            yield

    app = FastAPI(
        title="stree", version=stree.__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )

    @app.exception_handler(Refused)
    async def refuse(_: HttpRequest, error: Refused) -> JSONResponse:
        server.statistics.note_refusal(error.status)
        return error.response()

    @app.exception_handler(StreeError)
    async def refuse_usage(request: HttpRequest, error: StreeError) -> JSONResponse:
        return await refuse(request, _refusal_of(error))

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def refuse_route(request: HttpRequest, error: Any) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, Refused(error.status_code, message))

    @app.exception_handler(Exception)
    async def refuse_fault(request: HttpRequest, error: Exception) -> JSONResponse:
        return await refuse(request, Refused(500, f"{type(error).__name__}: {error}"[:500]))

    @app.post("/v1/chat/completions")
    async def chat(request: HttpRequest) -> Response:
        return await reply(request, await server.body(request, ChatBody), server.asker.of_chat)

    @app.post("/v1/completions")
    async def complete(request: HttpRequest) -> Response:
        body = await server.body(request, CompletionBody)
        return await reply(request, body, server.asker.of_completion)

    async def reply(
        request: HttpRequest, body: B, ask: Callable[[B], list[Asked]]
    ) -> Response:
        if server.is_draining:
            raise Refused(503, "the server is going down: ask another")
        try:
            is_small = request.state.is_small
            asked = ask(body) if is_small else await asyncio.to_thread(ask, body)
        except StreeError as error:
            raise Refused(400, str(error)) from error
        made = Reply(server, body, asked)
        await made.submit()
        if body.stream:
            return StreamingResponse(made.stream(), media_type="text/event-stream")
        whole = asyncio.create_task(made.whole())
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(await whole)
        finally:
            for task in (whole, gone):
                task.cancel()

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> dict[str, Any]:
        server.require_key(request)
        return {"object": "list", "data": [server.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: HttpRequest, name: str) -> dict[str, Any]:
        server.require_key(request)
        server.require_name(name)
        return server.card()

    @app.get("/health")
    async def health() -> Response:
        is_well = server.engine.is_alive and not server.is_draining
        return Response(status_code=200 if is_well else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": stree.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.statistics.text(), media_type=METRICS_TYPE)

    @app.get("/speculation")
    async def speculation() -> dict[str, Any]:
        table: dict[str, Any] = await server.engine.call("speculation")
        return table

    @app.get("/")
    async def page() -> HTMLResponse:
        text = files("stree_pipelines.serving").joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text)

    return app


async def _gone(request: HttpRequest) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
