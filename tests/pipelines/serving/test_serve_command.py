"""`stree serve` as a process: what it prints, and how it goes down."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import psutil
import pytest
import torch
from ports import free_port

from stree.common.errors import InvariantBroken, UsageError
from stree.engine.plan_log import read_plan_log
from stree_pipelines.commands import serve

COMMAND = [
    sys.executable, "pipelines/serve.py", "checkpoints/python-docs-hybrid", "--drafter", "ngram:3",
    "--max_length", "512", "--num_rows", "2",
]
LONG = dict(prompt="a", max_tokens=400, temperature=0, ignore_eos=True, stream=True)


@pytest.fixture
def process(tmp_path):
    made = subprocess.Popen(
        [*COMMAND, "--port", "0", "--plan_log", str(tmp_path / "plans.jsonl")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    made.lines = []
    for line in made.stdout:
        made.lines.append(line)
        if found := re.search(r"served at (http://\S+)/v1", line):
            made.url = found[1]
            break
    assert hasattr(made, "url"), "".join(made.lines)
    yield made
    made.kill()
    made.wait()


@pytest.mark.costly
@pytest.mark.parametrize("library", ["llguidance", "opentelemetry"])
def test_a_missing_library_is_one_sentence(library):
    code = f"""
import runpy, sys
sys.modules[{library!r}] = None
sys.argv = {COMMAND[1:]!r}
runpy.run_path({COMMAND[1]!r}, run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1), ran.stderr
    assert f"needs stree[serve], {library} is not installed" in ran.stderr


def streaming(url: str, texts: list[str], begun: threading.Event) -> None:
    """Collect a long answer's texts; "cut" if its stream ends before it."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    texts += [each["text"] for each in event.get("choices", [])]
                    texts += ["error"] if "error" in event else []
                    begun.set()
                if line == "data: [DONE]":
                    texts.append("[DONE]")
    except httpx.HTTPError:
        texts.append("cut")
    begun.set()


@pytest.mark.costly
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_lets_answers_end_and_a_second_one_stops(process, signals, tmp_path):
    texts, begun = [], threading.Event()
    client = threading.Thread(target=streaming, args=(process.url, texts, begun))
    client.start()
    assert begun.wait(60)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.HTTPError):  # nobody listens any more
        httpx.post(f"{process.url}/v1/completions", json=LONG, timeout=5)
    if signals == 2:
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    client.join(30)
    assert (texts[-1] == "[DONE]") == (signals == 1)
    events = list(read_plan_log(tmp_path / "plans.jsonl"))
    assert [event.sequence.generation.max_new_tokens for event in events if event.sequence] == [400]
    assert any(event.report is not None for event in events)


@pytest.mark.costly
def test_a_dead_engine_ends_the_server_with_one_line(process):
    lines = "".join(process.lines)
    assert re.search(r"B for prefixes: [\d,]+ of 512 tokens each", lines)
    assert re.search(r"(?s) s: loading .* s: answering a first .* preparing steps of", lines)
    texts, begun = [], threading.Event()
    client = threading.Thread(target=streaming, args=(process.url, texts, begun))
    client.start()
    assert begun.wait(60)
    [engine] = [
        each for each in psutil.Process(process.pid).children()
        if "spawn_main" in " ".join(each.cmdline())
    ]
    engine.kill()
    assert process.wait(60) == InvariantBroken.exit_code
    client.join(30)
    told = process.stdout.read()
    assert "error: the engine's process has ended by itself (exit code -9)" in told
    assert "Traceback" not in told
    assert texts[-2:] == ["error", "[DONE]"]


@pytest.mark.costly
def test_a_target_that_is_not_there_is_one_line():
    told = subprocess.run(
        [*COMMAND[:2], "no/such/target", "--port", "0"], capture_output=True, text=True
    )
    assert told.returncode == 2 and "no/such/target" in told.stderr
    assert told.stderr.count("\n") == 1


def test_triton_tells_of_kernels_only_while_a_decoder_is_prepared(monkeypatch, capsys):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(serve, "COMPILING_S", 0.0)
    for error in (None, KeyError):
        with suppress(KeyError), serve.preparation_told():
            for cache_hit in (False, True, False):
                knobs.compilation.listener(src=None, cache_hit=cache_hit)
            if error is not None:
                raise error
        told = re.findall(r" s: (.*) compiled", capsys.readouterr().out)
        assert (told, knobs.compilation.listener) == (["1 kernel", "2 kernels"], None)


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError) as refused:
        serve.main(["no/target", "--port", str(port)])
    assert str(refused.value).startswith(f"nobody can listen at 127.0.0.1:{port}: ")
