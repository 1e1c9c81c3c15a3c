"""Programs that measure servers get what the decoder gives, where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from running_server import TARGET, Running

from stree import Decoder

QUESTIONS = [
    {"question": "A list is a", "choices": ["mutable sequence", "number"], "label": 0},
    {"question": "The json module", "choices": ["is a tuple", "encodes objects"], "label": 1},
    {"question": "An int is", "choices": ["a file", "an integer"], "label": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
KINDS = {
    "choices": (
        "local-completions",
        "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list: [{metric: acc}]",
    ),
    "answers": (
        "local-completions",
        "output_type: generate_until\ndoc_to_target: question\n"
        "generation_kwargs: {until: [' the'], max_gen_toks: 12, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]",
    ),
    "chat answers": (
        "local-chat-completions",
        "output_type: generate_until\ndoc_to_target: question\n"
        "generation_kwargs: {until: [' the'], max_gen_toks: 12, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]",
    ),
}


def log_likelihood(running: Running, context: str, text: str) -> float:
    """Return the target's log-probability of a text after a context, in fp64 softmax."""
    tokenizer, target = running.decoder.tokenizer, running.decoder.target
    before, ids = tokenizer(context).input_ids, tokenizer(context + text).input_ids
    with torch.no_grad():
        logits = target.logits(target.hidden_states(torch.tensor([ids])))[0].double()
    scores = logits.log_softmax(-1)
    return sum(float(scores[at - 1, ids[at]]) for at in range(len(before), len(ids)))


def run(module: str, *arguments: str) -> str:
    told = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-3000:]
    return told.stdout


@pytest.mark.costly
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_lm_eval_measures_the_target(running, kind, tmp_path):
    model, more = KINDS[kind]
    data, name = tmp_path / "questions.jsonl", f"own_{kind.replace(' ', '_')}"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "task.yaml").write_text(TASK.format(name=name, data=data, more=more))
    is_chat, out = "chat" in model, tmp_path / "out"
    route = "chat/completions" if is_chat else "completions"
    run(
        "lm_eval", "--model", model, "--tasks", name, "--include_path", str(tmp_path),
        "--model_args", f"model=docs,base_url={running.url}/v1/{route},tokenizer={TARGET},"
        "num_concurrent=2,max_retries=1", "--log_samples", "--output_path", str(out),
        *(["--apply_chat_template"] if is_chat else []),
    )
    [samples] = out.rglob("samples_*.jsonl")
    found = {}
    for line in Path(samples).read_text().splitlines():
        sample = json.loads(line)
        found[sample["doc"]["question"]] = sample["resps"]
    plain = Decoder(running.decoder.target, max_length=256, tokenizer=running.decoder.tokenizer)
    for each in QUESTIONS:
        question, resps = each["question"], found[each["question"]]
        if kind == "choices":
            told = [float(score) for [[score, _]] in resps]
            wanted = [
                log_likelihood(running, question, f" {choice}") for choice in each["choices"]
            ]
            assert told == pytest.approx(wanted, abs=1e-3)
            continue
        settings = dict(max_new_tokens=12, temperature=0.0, stop_strings=[" the"])
        output = (
            plain.chat([{"role": "user", "content": question}], **settings) if is_chat
            else plain.complete(question, **settings)
        )
        assert resps == [[output.text.split(" the")[0]]]


@pytest.mark.costly
@pytest.mark.skipif(find_spec("guidellm") is None, reason="GuideLLM is not installed")
def test_guidellm_puts_a_load_on_the_server(running, tmp_path):
    out = tmp_path / "out.json"
    run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={running.url},model=docs",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={TARGET}", "--data",
        "kind=synthetic_text,prompt_tokens=16,output_tokens=12", "--output",
        f"kind=json,path={out}", "--disable-progress",
    )
    [benchmark] = json.loads(out.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"]
    assert {each["output_tokens"] for each in requests["successful"]} == {12}
