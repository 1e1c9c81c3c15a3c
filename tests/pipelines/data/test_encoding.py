"""Encoding conversations: rows that a template refuses are counted with their place and skipped."""

import json

import pytest

from stree.chat_encoding import ChatEncoder
from stree.common.errors import BadData
from stree_pipelines.data import loss_mask
from stree_pipelines.data.answering import read_prompts
from stree_pipelines.data.conversations import read_conversations
from stree_pipelines.data.datamodule import tokenize
from stree_pipelines.data.encoding import encoded, thought_in
from stree_pipelines.data.tokenizer_training import train_tokenizer

NO_SYSTEM = (
    "{%- for m in messages -%}{%- if m.role == 'system' -%}"
    "{{- raise_exception('no system role') -}}{%- endif -%}{{- '<|' + m.role + '|>' -}}"
    "{{- '<think>' + m.reasoning + '</think>' if m.reasoning -}}{{- m.content + '<|end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
THINKING = NO_SYSTEM.replace("'<|assistant|>'", "'<|assistant|><think>'").replace(
    "+ m.reasoning + '</think>' if m.reasoning",
    "+ (m.reasoning or '') + '</think>' if m.role == 'assistant'",
)
UNREAD = NO_SYSTEM.replace("m.reasoning", "m.other")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(["a class"] * 4, 320, tmp_path_factory.mktemp("tokenizer") / "t")


def rows(path, *more):
    """Write rows of one exchange, `more` in the middle, and return the path."""
    one = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [{"messages": turns} for turns in (one, *more, one)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_refused_rows_are_counted_with_their_place(tokenizer, tmp_path):
    bad = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    path = rows(tmp_path / "a.jsonl", bad)
    table, report = tokenize(str(path), tokenizer, ChatEncoder(tokenizer, NO_SYSTEM))
    assert len(table) == report.accepted == 2 and report.given == 3
    assert f"1 refused by the chat template (first at {path}:2: " in str(report)
    assert "no system role" in str(report)
    path.write_text(json.dumps({"messages": bad}))
    with pytest.raises(BadData, match=r"no usable conversation left.*no system role"):
        tokenize(str(path), tokenizer, ChatEncoder(tokenizer, NO_SYSTEM))


def test_prompts_that_a_template_refuses_are_left_out(tokenizer, tmp_path):
    bad = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    path, told = rows(tmp_path / "a.jsonl", bad), []
    prompts = read_prompts(str(path), tokenizer, "first", template=NO_SYSTEM, say=told.append)
    assert [prompt.number for prompt in prompts] == [0, 2]
    assert len(told) == 1 and "1 prompts" in told[0] and f"{path}:2: " in told[0]
    path.write_text(json.dumps({"messages": bad}))
    with pytest.raises(BadData, match=r"1 prompts .* are left out, .*no system role"):
        read_prompts(str(path), tokenizer, "first", template=NO_SYSTEM)


def test_the_shown_mask_is_the_training_s(tokenizer, tmp_path, capsys):
    ask = {"role": "user", "content": "a"}
    turns = [ask, {"role": "assistant", "content": "no", "loss": False}, ask,
             {"role": "assistant", "content": "yes"}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    tokenizer.save_pretrained(tmp_path / "t")
    loss_mask.main([str(path), "--tokenizer", str(tmp_path / "t")])
    said = capsys.readouterr().out
    assert "<|assistant|>no<|end|>" in said and "⟦yes<|end|>⟧" in said


def texts(path, tokenizer, template):
    conversations, report = read_conversations(path)
    samples = encoded(conversations, report, ChatEncoder(tokenizer, template))
    return [
        tokenizer.decode(sample.tokens[sample.assistant]) for _, each in samples for sample in each
    ], report


def test_thoughts_reach_the_template_or_the_row_is_skipped(tokenizer, tmp_path):
    ask = {"role": "user", "content": "a"}
    beside = [ask, {"role": "assistant", "content": "c", "reasoning_content": "Hm"}]
    inside = [ask, {"role": "assistant", "content": "<think>\nHm\n</think>\n\nc"}]
    path = rows(tmp_path / "a.jsonl", beside, inside)
    found, report = texts(path, tokenizer, NO_SYSTEM)
    assert found == ["b<|end|>", *["<think>Hm</think>c<|end|>"] * 2, "b<|end|>"]
    assert report.num_without_thought == 0 and "warning" not in str(report)
    found, report = texts(path, tokenizer, UNREAD)
    assert found == ["b<|end|>", inside[1]["content"] + "<|end|>", "b<|end|>"]
    assert report.accepted == 3
    assert report.first_seen == {"thoughts that the chat template does not read": f"{path}:2"}


def test_data_without_thoughts_are_warned_of_once(tokenizer, tmp_path):
    found, report = texts(rows(tmp_path / "a.jsonl"), tokenizer, THINKING)
    assert found == ["b<|end|>"] * 2
    assert str(report).count("warning: 2 conversations have answers without thoughts") == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("b", ("", "b")),
        ("<think></think>b", ("", "<think></think>b")),
        ("<think>a", ("", "<think>a")),
        ("b <think>a</think>", ("", "b <think>a</think>")),
    ],
)
def test_a_thought_is_found_at_a_text_s_beginning(text, found):
    assert thought_in(text) == found
