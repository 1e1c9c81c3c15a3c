"""Requests that no server can honour get one clear error of the 4xx kind, and harm nobody."""

from __future__ import annotations

import json
import socket
import time

import pytest

from stree_pipelines.serving.schemas import ChatBody, CompletionBody

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**changes) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": HELLO, "max_tokens": 3, **changes}).encode()


def text(**changes) -> tuple[str, bytes]:
    return TEXT, json.dumps({"prompt": "hello", "max_tokens": 3, **changes}).encode()


OUT_OF_RANGE = {
    "temperature": [-1, 1e-9, "hot", [1]], "top_p": [0, 1.5, -0.1, "a"], "top_k": [2**70, 1.5],
    "min_p": [2, -1], "n": [0, 129, 2.5, "two"], "max_tokens": [-1, 10**9, "many", 1.5],
    "seed": [-1, 2**64, "x"], "repetition_penalty": [0, -1, 1e9], "logit_bias": [
        {"a": 1}, {"99999999": 1}, [1], {"1": "x"},
    ],
    "presence_penalty": ["x", [1]], "stop": [[""], "", [[1]], {"a": 1}, [99999999]],
    "stop_token_ids": [[-1], ["a"], [10**8]], "min_tokens": [-1, "a"],
    "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}, {
        "type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}],
    "guided_regex": ["(", "[z-a]"], "speculation": ["../../etc/passwd", "tree of life", "beam-3"],
    "stream_options": [3, "x"], "model": ["other", 3], "timeout_s": [0, -1],
    "frequency_penalty": ["x", {}], "stream": ["maybe", 3], "ignore_eos": ["x"],
    "audio": [{"voice": "x"}], "modalities": [["audio"]], "functions": [[{"name": "f"}]],
    "prompt_logprobs": [1], "beam_search": [True], "best_of": [2],
    "include_stop_str_in_output": [True], "truncate_prompt_tokens": [4],
}
BODIES = [
    *(chat(**{name: value}) for name, values in OUT_OF_RANGE.items() for value in values),
    *(text(**{name: value}) for name, values in OUT_OF_RANGE.items() for value in values),
    *((path, raw) for path in (CHAT, TEXT) for raw in (
        b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe", b"\x00", b"[" * 10**5,
        b'{"a":' * 10**4, b'{"messages": "\xff"}', b'{"prompt": "\\ud800"}', b"NaN",
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    )),
    *(chat(messages=value) for value in (
        [], "hello", [3], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "u", "content": 1}], [{"role": "nobody", "content": "x"}], None,
        [{"role": "user", "content": "a " * 10**5}], [[]], {"role": "user"}, [None],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    )),
    *(text(prompt=value) for value in (
        "", [], [[]], [""], [-1], [10**9], [[1], "a"], [1.5], {"a": 1}, None, True, ["a", 3],
        "a " * 10**5, [2**70],
    )),
    chat(echo=True), chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    chat(top_logprobs=21), text(logprobs=-1), text(suffix="x"), text(max_tokens=0),
    chat(chat_template_kwargs={"no_such_variable": 1}), chat(chat_template_kwargs=[1]),
    chat(chat_template_kwargs={"chat_template": "{{ messages[0].content }}"}),
    chat(chat_template_kwargs={"chat_template": "/etc/hostname"}),
    text(prompt=["a"] * 69), chat(guided_regex="a", response_format={"type": "json_object"}),
    chat(tool_choice="required"), chat(tools="x"), chat(tools=[3]),
]


@pytest.fixture(autouse=True, scope="module")
def still_well(running):
    yield
    assert running.client.get("/health").status_code == 200
    assert running.engine.num_running == running.engine.num_waiting == 0
    assert running.post(messages=HELLO, max_tokens=2).status_code == 200


@pytest.mark.costly
def test_each_gets_one_clear_error(running):
    assert len(BODIES) >= 200
    headers = {"content-type": "application/json"}
    faults = []
    for path, body in BODIES:
        response = running.client.post(path, content=body, headers=headers)
        told = response.headers.get("content-type") == "application/json"
        error = response.json().get("error", {}) if told else {}
        is_clear = 0 < len(error.get("message", "")) < 1500 and "Traceback" not in response.text
        is_refused = 400 <= response.status_code < 500
        if not (is_refused and is_clear and error["code"] == response.status_code):
            faults.append(f"{body[:120]!r}: {response.status_code} {response.text[:200]}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("make", "kind"), [(chat, ChatBody), (text, CompletionBody)])
def test_null_stands_for_the_default_of_each_key(running, make, kind):
    names = {*kind.model_fields, "frequency", "functions"} - {"messages", "prompt", "max_tokens"}
    path, body = make(**dict.fromkeys(names))
    response = running.client.post(path, content=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/v1/nope", 404), ("PUT", "/metrics", 405),
     ("GET", "/../etc/passwd", 404)],
)
def test_other_routes_are_refused_in_the_same_form(running, method, path, status):
    response = running.client.request(method, path)
    assert response.status_code == status and response.json()["error"]["code"] == status


def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_server(running, caplog):
    host, port = running.client.base_url.host, running.client.base_url.port
    refused = 'stree:requests_refused_total{model_name="docs",status="400"} '

    def num_refused() -> float:
        _, _, rest = running.client.get("/metrics").text.partition(refused)
        return float(rest.split("\n")[0] or 0)

    before = num_refused()
    with socket.create_connection((host, port)) as link:
        link.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
    end = time.monotonic() + 30
    while num_refused() == before and time.monotonic() < end:
        time.sleep(0.01)
    assert num_refused() == before + 1
    assert "Traceback" not in caplog.text


def test_a_body_that_is_too_large_is_refused_before_all_of_it_has_come(running):
    response = running.client.post(CHAT, content=(b" " * 2**20 for _ in range(12)))
    assert response.status_code == 413 and "shorten" in response.json()["error"]["message"]
