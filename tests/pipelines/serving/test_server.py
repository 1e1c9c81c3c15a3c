"""Clients of OpenAI's API get what the decoder gives, whole or streamed, alone or together."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families as parse_metrics
from running_server import TARGET, Running
from toys import tiny_model
from transformers import AutoTokenizer

import stree
from stree_pipelines.serving.statistics import Statistics, merged

QUESTION = [{"role": "user", "content": "What is a list?"}]
SETTINGS = dict(model="docs", max_tokens=24, temperature=0.0)


@pytest.fixture
def client(running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def plain(running: Running) -> stree.Decoder:
    return stree.Decoder(
        running.decoder.target, max_length=256, tokenizer=running.decoder.tokenizer
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "settings",
    [dict(temperature=1.0, seed=5, top_p=0.9), dict(temperature=0.0)], ids=["sampled", "greedy"],
)
def test_a_chat_is_answered_as_plain_decoding_answers_it(running, client, settings):
    asked = {**SETTINGS, **settings}
    whole = client.chat.completions.create(messages=QUESTION, **asked)
    wanted = plain(running).chat(QUESTION, max_new_tokens=24, **settings)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].finish_reason == {"eos": "stop"}.get(
        wanted.finish_reason, wanted.finish_reason
    )
    assert whole.usage.completion_tokens == len(wanted.tokens)
    parts, usage = [], None
    for event in client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **asked
    ):
        parts += [each.delta.content or "" for each in event.choices]
        usage = event.usage or usage
    assert "".join(parts) == wanted.text and len(parts) > 3
    assert usage.completion_tokens == len(wanted.tokens)
    assert usage.prompt_tokens_details.cached_tokens > 0  # of the same messages before


@pytest.mark.costly
def test_an_asynchronous_client_gets_many_answers_at_once(running):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            given = [
                client.chat.completions.create(
                    messages=QUESTION, model="docs", max_tokens=12, temperature=1.0, seed=seed, n=2
                )
                for seed in range(3)
            ]
            return [
                choice.message.content
                for each in await asyncio.gather(*given) for choice in each.choices
            ]

    decoder = plain(running)
    wanted = [
        each.text for seed in range(3)
        for each in decoder.chat(
            QUESTION, max_new_tokens=12, temperature=1.0, seed=seed, num_return_sequences=2
        )
    ]
    assert asyncio.run(ask()) == wanted


def test_log_probabilities_of_a_prompt_and_its_answer_are_the_targets(running, client):
    """As lm-eval asks for them: the prompt is given back, and one token more."""
    prompts = ["A list is a sequence.", [5, 6, 7, 8, 9]]
    for prompt in prompts:
        reply = client.completions.create(
            model="docs", prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
        )
        found = reply.choices[0].logprobs
        tokenizer = running.decoder.tokenizer
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        with torch.no_grad():
            target = running.decoder.target
            logits = target.logits(target.hidden_states(torch.tensor([ids])))[0].double()
        scores = logits.log_softmax(-1)
        wanted = [float(scores[at, token]) for at, token in enumerate(ids[1:])]
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-4)
        assert found.token_logprobs[-1] == pytest.approx(float(scores[-1].max()), abs=1e-4)
        assert len(found.tokens) == len(found.top_logprobs) == len(ids) + 1
        for at, best in enumerate(found.top_logprobs[1:-1]):
            assert max(best.values()) == pytest.approx(float(scores[at].max()), abs=1e-4)
    nothing = running.post(
        "/v1/completions", prompt="A list", max_tokens=0, echo=True, logprobs=0, model="docs"
    ).json()
    assert nothing["choices"][0]["text"] == "A list"
    assert nothing["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_log_probabilities_are_those_of_a_whole_reply(client, echo):
    asked = dict(model="docs", prompt="A list", max_tokens=9, seed=4, n=2, logprobs=1, echo=echo)
    whole = client.completions.create(**asked)
    parts = {0: [], 1: []}
    for event in client.completions.create(**asked, stream=True):
        for choice in event.choices:
            parts[choice.index].append(choice.logprobs)
    for choice in whole.choices:
        assert len(parts[choice.index]) > 1
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [each for part in parts[choice.index] for each in getattr(part, name) or ()]
            assert joined == pytest.approx(getattr(choice.logprobs, name), abs=1e-5), name


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_answers_follow_their_form_and_are_plain_decodings(running, temperature):
    schema = {
        "type": "object", "additionalProperties": False, "required": ["kind", "size"],
        "properties": {"kind": {"enum": ["list", "tuple"]}, "size": {"type": "integer"}},
    }
    forms = [
        dict(response_format={"type": "json_schema", "json_schema": {"schema": schema}}),
        dict(guided_regex="(ab|ba){4}c"),
    ]
    for form in forms:
        asked = dict(messages=QUESTION, max_tokens=60, temperature=temperature, seed=2, **form)
        replies = [
            running.post(**asked, speculation=how).json() for how in (True, False, "chain-2")
        ]
        texts = [each["choices"][0]["message"]["content"] for each in replies]
        assert len(set(texts)) == 1
        if "guided_regex" in form:
            assert re.fullmatch("(ab|ba){4}c", texts[0])
            assert replies[0]["choices"][0]["finish_reason"] == "stop"
        else:
            assert texts[0].lstrip().startswith("{")
            if replies[0]["choices"][0]["finish_reason"] == "stop":
                assert json.loads(texts[0])["kind"] in ("list", "tuple")
        assert replies[0]["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


CALLING = (
    "{%- for m in messages -%}<|user|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if tools %}{{ tools | length }}<tool_call></tool_call>{% endif -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


FORM = r'ok<tool_call>\{"name": "add", "arguments": \{"a": 1\}\}</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_of_a_tool_comes_as_one(running, client, streams, monkeypatch):
    monkeypatch.setattr(running.server.tokenizer, "chat_template", CALLING)
    tool = {"type": "function", "function": {
        "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }}
    asked = dict(
        messages=QUESTION, tools=[tool], **{**SETTINGS, "max_tokens": 60},
        extra_body=dict(guided_regex=FORM),
    )
    if streams:
        events = list(client.chat.completions.create(stream=True, **asked))
        calls = [call for e in events for c in e.choices for call in c.delta.tool_calls or []]
        text = "".join(c.delta.content or "" for e in events for c in e.choices)
        reason = events[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        calls, text = choice.message.tool_calls, choice.message.content
        reason = choice.finish_reason
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [
        ("add", {"a": 1})
    ]
    assert (text, reason) == ("ok", "tool_calls")


@pytest.mark.parametrize(
    "count", [12, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_many_clients_at_once_get_what_each_would_get_alone(running, count):
    draw = random.Random(3)
    bodies = []
    words = ["list", "tuple", "set", "dict", "str", "int", "the", "of", "is", "a"]
    for number in range(count):
        text = " ".join(draw.choices(words, k=draw.randint(1, 30)))
        bodies.append(dict(
            prompt=text, max_tokens=draw.randint(1, 25), temperature=draw.choice([0.0, 0.9]),
            seed=number, stream=draw.random() < 0.5, speculation=draw.choice([True, False]),
            stop=draw.choice([None, [".", " the"], "e"]),
            presence_penalty=draw.choice([0.0, 0.5]),
        ))

    def ask(body: dict) -> str:
        if not body["stream"]:
            return running.post("/v1/completions", **body).json()["choices"][0]["text"]
        parts = []
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    parts += [each["text"] for each in json.loads(line[6:])["choices"]]
                    if body["seed"] % 7 == 0:
                        return ""  # the client goes away
        return "".join(parts)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, bodies))
    decoder = plain(running)
    for body, answer in zip(bodies, answers, strict=True):
        if body["stream"] and body["seed"] % 7 == 0:
            continue
        wanted = decoder.complete(
            body["prompt"], max_new_tokens=body["max_tokens"], temperature=body["temperature"],
            seed=body["seed"] if body["temperature"] else None, stop_strings=body["stop"] or (),
            presence_penalty=body["presence_penalty"],
        )
        stream = stree.TextStream(decoder.tokenizer, [body["stop"]] if isinstance(
            body["stop"], str) else body["stop"] or ())
        text = "".join(map(stream.add, wanted.tokens)) + stream.end()
        assert answer == text
    wait_until(lambda: running.engine.num_running == running.engine.num_waiting == 0)
    assert running.decoder.num_free_rows == 4


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_row(running, stream):
    body = dict(prompt="a", max_tokens=200, temperature=0, ignore_eos=True, stream=stream)

    def ask() -> None:
        with suppress(httpx.TimeoutException), running.client.stream(
            "POST", "/v1/completions", json=body, timeout=1.0
        ):
            time.sleep(0.2)

    thread = threading.Thread(target=ask, daemon=True)
    before = running.engine.num_running
    thread.start()
    wait_until(lambda: running.engine.num_running > before or not thread.is_alive())
    wait_until(lambda: running.engine.num_running == before)


def test_metrics_of_several_servers_are_one_text_with_their_names():
    texts = {}
    for name, refusals in (("a", 1), ("b", 2)):
        statistics = Statistics(SimpleNamespace(num_running=3, num_waiting=0), "m")
        for _ in range(refusals):
            statistics.note_refusal(429)
        texts[name] = statistics.text().decode()
    families = {each.name: each for each in parse_metrics(merged(texts).decode())}
    refused, running, first = (families[name] for name in (
        "stree:requests_refused", "vllm:num_requests_running", "vllm:time_to_first_token_seconds",
    ))
    told = {each.labels["replica"]: each.value for each in refused.samples}
    assert (told, refused.type) == ({"a": 1, "b": 2}, "counter")
    assert [each.value for each in running.samples] == [3, 3]
    assert {each.labels["replica"] for each in first.samples} == {"a", "b"}


def test_the_usage_and_the_metrics_agree(running):
    def counted() -> dict[str, float]:
        told = running.client.get("/metrics").text
        found = re.findall(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", told, re.MULTILINE)
        return {name: float(value) for name, value in found}

    before = counted()
    usage = running.post(
        messages=QUESTION, max_tokens=30, temperature=0, ignore_eos=True
    ).json()["usage"]
    after = counted()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == 30 == gained["vllm:generation_tokens_total"]
    accepted = details["accepted_prediction_tokens"]
    assert accepted == gained["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted + details["rejected_prediction_tokens"] == (
        gained["vllm:spec_decode_num_draft_tokens_total"]
    )
    histogram = usage["acceptance_histogram"]
    assert sum(count * at for at, count in enumerate(histogram)) == accepted
    assert sum(histogram) == usage["num_spec_steps"]
    assert math.isclose(usage["mean_acceptance_length"], 29 / usage["num_spec_steps"])
    assert gained["vllm:inter_token_latency_seconds_count"] == 29


def test_a_key_is_asked_for_and_a_full_queue_says_when_to_come_back():
    made = Running(num_rows=1, max_waiting=0, api_key="secret", num_prefixes=0)
    runner, launch = made.decoder.worker.runner, made.decoder.worker.runner.launch

    def slowly(*arguments):
        time.sleep(0.05)
        return launch(*arguments)

    runner.launch = slowly
    try:
        for header in ("", "secret", "Basic secret", "Bearer", "Bearer other"):
            told = made.client.get("/v1/models", headers={"authorization": header})
            assert told.status_code == 401, header
        made.client.headers["authorization"] = "bearer secret"
        card = made.client.get("/v1/models").json()["data"][0]
        assert card["id"] == "docs" and made.client.get("/v1/models/docs").json() == card
        assert made.client.get("/v1/models/other").json()["error"]["code"] == 404
        body = dict(prompt="a", max_tokens=230, temperature=0, ignore_eos=True, stream=True)
        with made.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # dropped, it closes the connection
            next(lines)
            refused = made.post(messages=QUESTION)
            assert refused.status_code == 429, refused.text
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        wait_until(lambda: made.engine.num_running == 0)
        assert made.post(messages=QUESTION, max_tokens=2).status_code == 200
    finally:
        made.close()


def test_an_answer_that_fails_is_an_error_and_the_server_goes_on(running, monkeypatch):
    launch = running.decoder.worker.runner.launch
    failing = iter([True])

    def fail(*arguments):
        if next(failing, False):
            raise RuntimeError("of the device")
        return launch(*arguments)

    monkeypatch.setattr(running.decoder.worker.runner, "launch", fail)
    reply = running.post(messages=QUESTION, max_tokens=5)
    assert reply.status_code == 500 and "of the device" in reply.json()["error"]["message"]
    assert running.post(messages=QUESTION, max_tokens=5).status_code == 200
    assert running.client.get("/health").status_code == 200


def test_a_request_may_name_its_tree(running):
    trees = {"paper": 12, "chain-2": 2, False: 0}
    for name, drafts in trees.items():
        usage = running.post(
            messages=QUESTION, max_tokens=9, temperature=0, speculation=name, ignore_eos=True
        ).json()["usage"]
        details = usage["completion_tokens_details"]
        assert sum(details.values()) == drafts * usage["num_spec_steps"]


def test_a_dead_engine_is_said_by_health_and_by_every_answer():
    made = Running(num_rows=1, num_prefixes=0)
    answers = []
    body = dict(prompt="a", max_tokens=200, temperature=0, ignore_eos=True)
    launch = made.decoder.worker.runner.launch
    made.decoder.worker.runner.launch = lambda *given: (time.sleep(0.02), launch(*given))[1]
    try:
        assert made.client.get("/health").status_code == 200
        client = threading.Thread(
            target=lambda: answers.append(made.post("/v1/completions", **body))
        )
        client.start()
        wait_until(lambda: made.engine.num_running == 1)
        made.end.link.shutdown(socket.SHUT_RDWR)  # as its process's end does
        client.join(60)
        answers.append(made.post("/v1/completions", **body))
        for each in answers:
            assert each.status_code == 500
            assert "the engine's process has ended" in each.json()["error"]["message"]
        assert made.client.get("/health").status_code == 503
    finally:
        made.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_go_on_is_said_by_health():
    """Its process ends with the cause, as the thread does here."""
    made = Running(num_rows=1, num_prefixes=0)

    def fail(plan):
        raise RuntimeError("of the device")

    made.decoder.worker.execute = fail
    try:
        assert made.client.get("/health").status_code == 200
        answer = made.post("/v1/completions", prompt="a", max_tokens=2)
        assert answer.status_code == 500
        assert "of the device" in answer.json()["error"]["message"]
        wait_until(lambda: made.client.get("/health").status_code == 503)
        made.engine_thread.join(60)
        assert not made.engine_thread.is_alive()
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_thousand_requests_leave_no_memory_behind():
    tiny = stree.BatchDecoder(
        tiny_model(), num_rows=4, max_length=64, num_prefixes=8,
        tokenizer=AutoTokenizer.from_pretrained(TARGET),
    )
    running, process, count = Running(decoder=tiny), psutil.Process(), 20_000
    bodies = [
        dict(prompt=[5 + number % 50], max_tokens=1 + number % 2, stream=number % 3 == 0,
             temperature=0.0) for number in range(count)
    ]

    def ask(some: list[dict]) -> None:
        with httpx.Client(base_url=running.url, timeout=120) as client:
            for body in some:
                assert client.post("/v1/completions", json=body).status_code == 200

    def ask_all(some: list[dict]) -> int:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, [some[place::4] for place in range(4)]))
        gc.collect()
        return process.memory_info().rss

    before = ask_all(bodies[: count // 5])
    after = ask_all(bodies[count // 5 :])
    running.close()
    told = [f"{each / 2**20:.1f} MiB" for each in (before, after)]
    print(f"{told[0]} after {count // 5} requests, {told[1]} after {count}")
    assert after - before < 24 * 2**20
