"""Two replicas on Ray Serve: one dies under load, and no request is lost that was not streaming."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from ports import free_port
from toys import load_quietly

pytest.importorskip("ray")

from stree_pipelines.serving.replicas import session_of

TARGET = "checkpoints/python-docs-hybrid"
COMMAND = [
    sys.executable, "pipelines/serve.py", TARGET, "--drafter", "ngram:3", "--max_length", "256",
    "--num_rows", "2", "--device", "cpu",
]


def chat(*texts: str, **more) -> bytes:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"messages": messages, **more}).encode()


def test_a_conversation_s_turns_have_one_session_and_others_another():
    first = session_of(chat("What is a list?"))
    assert session_of(chat("What is a list?", "A sequence.", "And a tuple?", seed=1)) == first
    assert len({first, session_of(chat("What is a set?")), session_of(b'{"prompt": "a"}'), ""}) == 4
    for none in (b"", b"[1]", b"{", b"null", b'{"model": "m"}', b"[" * 100_000):
        assert session_of(none) == ""


@pytest.fixture
def served(tmp_path):
    port, log = free_port(), (tmp_path / "log").open("w+")
    patient = {  # where other work goes on beside it
        "RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60", "RAY_AUTH_MODE": "disabled",
    }
    process = subprocess.Popen(
        [*COMMAND, "--replicas", "2", "--port", str(port)], stdout=log, stderr=subprocess.STDOUT,
        env=os.environ | patient,
    )
    told = ""
    while "is served by 2 replicas" not in told:
        assert process.poll() is None, told
        time.sleep(0.5)
        told = (tmp_path / "log").read_text()
    yield process, f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def replicas_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [
        each for each in psutil.Process(process.pid).children(recursive=True)
        if re.match(r"ray::.*Replica:default:Replica", " ".join(each.cmdline()))
    ]


@pytest.mark.costly
@pytest.mark.timeout(900)
def test_a_replica_s_death_loses_no_whole_answer(served):
    process, url = served
    bodies = [
        dict(prompt=f"A {word} is", max_tokens=24, temperature=0.0)
        for word in ("list", "tuple", "set", "dict", "str", "int", "class", "module")
    ] * 3
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(client.post, "/v1/completions", json=each) for each in bodies]
        while sum(each.done() for each in asked) < 3:
            time.sleep(0.05)
        told = client.get("/metrics").text
        assert len(set(re.findall(r'^vllm:num_requests_running.*replica="(\w+)"', told, re.M))) == 2
        assert len(re.findall("^# TYPE vllm:num_requests_running ", told, re.M)) == 1
        victim, other = replicas_of(process)
        victim.kill()
        answers = [each.result() for each in asked]
        assert [each.status_code for each in answers] == [200] * len(bodies)
        assert other.is_running()
        streamed = client.post("/v1/completions", json={**bodies[0], "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n") and "error" not in streamed
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
    decoder = load_quietly(TARGET, max_length=256)
    for body, answer in zip(bodies[:8], answers, strict=False):
        wanted = decoder.complete(body["prompt"], max_new_tokens=24, temperature=0.0).text
        assert answer.json()["choices"][0]["text"] == wanted
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


def test_numbers_of_replicas_that_do_not_fit_are_refused():
    told = subprocess.run(
        [*COMMAND, "--replicas", "3", "--max_replicas", "2"], capture_output=True, text=True
    )
    assert told.returncode == 2 and "--replicas is 3, --max_replicas 2" in told.stderr
