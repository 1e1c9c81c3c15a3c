"""Inputs of `generate`, `complete` and `chat`, as users of transformers give them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from toys import Streamer, right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree, generate, load
from stree.chat_encoding import ChatEncoder
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import UsageError
from stree.generation import DecodingStats
from stree.prompts import chat_prompt

SHIPPED = Path(__file__).parents[2] / "checkpoints/python-docs-hybrid"
PROMPT, OTHER = [5, 6, 7, 8], [9, 10]
EIGHT = GenerationConfig(8)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    target = tiny_model(1)
    return Decoder(target, right_now_and_then(target), TokenTree.chain(2), max_length=64)


@pytest.fixture(scope="module")
def shipped() -> Decoder:
    return load(SHIPPED, device="cpu", max_length=256)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


# Prompts


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        range(5, 9),
        np.array(PROMPT, dtype=np.uint16),
        [np.int64(each) for each in PROMPT],
        list(torch.tensor(PROMPT)),
        torch.tensor(PROMPT, dtype=torch.int32),
        np.array([PROMPT]),
        torch.tensor([PROMPT]),
        {"input_ids": PROMPT},
        {"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 4)},
        {"input_ids": [0, 0, *PROMPT], "attention_mask": [0, 0, 1, 1, 1, 1]},
        {"input_ids": torch.tensor([[*PROMPT, 0]]), "attention_mask": [[1, 1, 1, 1, 0]]},
        transformers.BatchEncoding({"input_ids": PROMPT, "token_type_ids": [0] * 4}),
    ],
    ids=lambda prompt: f"{type(prompt).__name__}-{prompt!r:.30}",
)
def test_one_prompt_in_any_form_gives_the_same(decoder, prompt):
    wanted = decoder.generate(PROMPT, EIGHT).tokens
    assert decoder.generate(prompt, EIGHT).tokens == wanted
    assert decoder.batch.generate(prompt, EIGHT)[0].tokens == wanted


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("prompts", "mask"),
    [
        ([PROMPT, OTHER], None),
        ([torch.tensor(PROMPT), np.array(OTHER)], None),
        ([{"input_ids": PROMPT}, {"input_ids": OTHER, "attention_mask": [1, 1]}], None),
        (torch.tensor([PROMPT, [0, 0, *OTHER]]), torch.tensor([[1] * 4, [0, 0, 1, 1]])),
        (torch.tensor([PROMPT, [*OTHER, 0, 0]]), [[1] * 4, [True, True, False, False]]),
        ([PROMPT, [0, 0, *OTHER]], [[1] * 4, [0, 0, 1, 1]]),
    ],
)
def test_several_prompts_give_a_list_whoever_decodes_them(decoder, prompts, mask):
    wanted = [decoder.generate(each, EIGHT).tokens for each in (PROMPT, OTHER)]
    rows = BatchDecoder(decoder.target, decoder.drafter.model, num_rows=2, max_length=64)
    for way in (decoder.generate, rows.generate):
        outputs = way(prompts, EIGHT, attention_mask=mask)
        assert [each.tokens for each in outputs] == wanted


def test_a_tokenizer_s_batch_is_answered_as_its_texts_alone(shipped, tokenizer):
    texts = ["The json module", "What is a list?"]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert (batch.attention_mask == 0).any()
    outputs = shipped.generate(**batch, max_new_tokens=6)
    assert [each.tokens for each in outputs] == [
        shipped.complete(text, max_new_tokens=6).tokens for text in texts
    ]
    assert [each.text for each in shipped.complete(texts, max_new_tokens=6)] == [
        tokenizer.decode(each.tokens, skip_special_tokens=True) for each in outputs
    ]
    with pytest.raises(UsageError, match=r"padding token \(0\), and there is no attention_mask"):
        shipped.generate(batch.input_ids, max_new_tokens=6)


def test_a_chat_goes_by_the_template(shipped, tokenizer):
    messages = [{"role": "user", "content": "What does `json.loads` do?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    wanted = shipped.generate(ids, max_new_tokens=6)
    assert shipped.chat(messages, max_new_tokens=6).tokens == wanted.tokens
    encoded = tokenizer.backend_tokenizer.encode(tokenizer.decode(ids.input_ids[0]))
    assert shipped.generate(encoded, max_new_tokens=6).tokens == wanted.tokens
    assert [each.tokens for each in shipped.generate([encoded], max_new_tokens=6)] == [
        wanted.tokens
    ]
    one, same = shipped.chat([messages, messages[0]["content"]], max_new_tokens=6)
    assert one.tokens == same.tokens == wanted.tokens and wanted.text == one.text


def test_a_message_cannot_spell_control_tokens_and_has_the_ids_of_training(shipped, tokenizer):
    messages = [
        {"role": "user", "content": "what is <|end|> for?"},
        {"role": "assistant", "content": "It ends a turn."},
        {"role": "user", "content": "and <|assistant|>?"},
    ]
    ids = chat_prompt(tokenizer, messages).ids
    names = tokenizer.convert_ids_to_tokens(ids)
    assert [name for name in names if name.startswith("<|")] == [
        "<|user|>", "<|end|>", "<|assistant|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>",
    ]
    turns = [(each["role"], each["content"]) for each in messages]
    (trained,) = ChatEncoder(tokenizer).encode([*turns, ("assistant", "So does that.")])
    assert ids == trained.tokens[: len(ids)].tolist() and trained.assistant[len(ids)]
    wanted = shipped.generate(ids, max_new_tokens=6)
    assert shipped.chat(messages, max_new_tokens=6).tokens == wanted.tokens


# As Qwen3's: an answer's turn opens with a thought, which the history leaves out
THOUGHTS_DROPPED = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content.split('</think>')[-1] + "
    "'<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}"
)


@pytest.mark.parametrize(
    "template",
    [THOUGHTS_DROPPED, pytest.param(None, marks=pytest.mark.costly)], ids=["dropped", "kept"],
)
def test_the_next_turn_of_a_chat_reads_only_what_is_new(shipped, tokenizer, template):
    keeping = load(SHIPPED, device="cpu", max_length=256, num_prefixes=2)
    options = dict(max_new_tokens=6, chat_template_kwargs={"chat_template": template})
    messages, known = [], 0
    for question in ("what is a list?", "and a set?", "and a tuple?"):
        messages.append({"role": "user", "content": question})
        out = keeping.chat(messages, **options)
        assert out.tokens == shipped.chat(messages, **options).tokens
        assert out.stats.num_reused_tokens >= known
        known = chat_prompt(tokenizer, messages, chat_template=template).messages_end
        messages.append({"role": "assistant", "content": f"Hm.</think>{out.text}"})
    assert known > 30


def test_a_prompt_s_messages_end_where_its_answer_is_opened(tokenizer):
    messages = [{"role": "user", "content": "what is a list?"}]
    for template, opening in (
        (THOUGHTS_DROPPED, "<|assistant|><think>"),
        (None, "<|assistant|>"),
        (OF_TEXT, ""),  # opens no turn
        (OF_TEXT + "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}", ""),
    ):
        ids, end = chat_prompt(tokenizer, messages, chat_template=template)
        assert tokenizer.decode(ids[end:]) == opening
        assert ids == ChatEncoder(tokenizer, template).encode_prompt(messages)


OF_TEXT = "{% for m in messages %}{{ m.role + ': ' + m.content }};{% endfor %}"
PRINTS = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
)


@pytest.fixture
def templated(tokenizer):
    """Return, as text, what `chat_prompt` makes of messages with a template."""

    def render(template, messages, **options):
        given = copy.deepcopy(tokenizer)
        given.chat_template = template
        return tokenizer.decode(chat_prompt(given, messages, **options).ids)

    return render


@pytest.mark.parametrize(
    ("template", "wanted"),
    [(OF_TEXT, "user: ab;"), (PRINTS, "user: ab;"), (OF_PARTS, "user: [a][b];")],
)
def test_content_parts_are_the_template_s_or_one_text(templated, template, wanted):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert templated(template, [{"role": "user", "content": parts}]) == wanted
    assert templated(template, [{"role": "user", "content": "ab"}]) == "user: ab;"


def test_a_template_gets_tools_documents_and_its_own_variables(templated):
    template = (
        "{{ tools[0].function.name if tools }},{{ documents[0].title if documents }},"
        "{{ enable_thinking }},{{ depth }},{{ (messages[0].tool_calls is defined) if messages }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )

    def twice(number: int) -> int:
        """Double a number.

        Args:
            number: Any.
        """
        return 2 * number

    calls = [{"role": "assistant", "tool_calls": [{"name": "twice"}]}]
    given = dict(tools=[twice], documents=[{"title": "Law", "text": "…"}], enable_thinking=False)
    assert templated(template, calls, **given, depth=3) == "twice,Law,False,3,True>"
    assert templated(template, "a", depth=3) == ",,,3,False>"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ("a", dict(enable_thinking=True), "template does not read enable_thinking: leave it out"),
        ("a", dict(tools=[{"type": "function"}]), "template does not read tools"),
        ("a", dict(chat_template_kwargs={"tokenize": False}), "cannot honour tokenize"),
        ([{"role": "user", "content": [{"type": "image", "url": "x.png"}]}], {},
         r"content has a dict .*image.*, wanted parts"),
        ([{"role": "user"}], {}, "wanted messages"),
    ],
)
def test_what_a_template_does_not_read_is_refused(shipped, messages, options, message):
    with pytest.raises(UsageError, match=message):
        shipped.chat(messages, max_new_tokens=2, **options)


def test_a_chat_s_options_reach_the_template(shipped, tokenizer, monkeypatch):
    template = "{{ 'yes' if enable_thinking else 'no' }}{{ mood }}{{ messages[0].content }}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    wanted = shipped.complete("yesgooda", max_new_tokens=4)
    got = shipped.chat(
        "a", enable_thinking=True, chat_template_kwargs={"mood": "good"}, max_new_tokens=4
    )
    assert got.tokens == wanted.tokens


@pytest.mark.parametrize(
    ("prompt", "mask", "message"),
    [
        *((prompt, None, message) for prompt, message in [
            ("hello", r"the prompt is text \('hello'\), wanted token ids.*complete"),
            (["hello"], "the prompt is text"),
            ([{"role": "user", "content": "x"}], "chat.messages. takes conversations"),
            ({}, "an empty mapping, wanted input_ids"),
            ({"input_ids": PROMPT, "pixel_values": 1}, "a mapping of input_ids, pixel_values"),
            ([1.5, 2.5], "float32 tensor"),
            ([True, False], "bool tensor"),
            ([[1, 2], 3], r"tensor of shape \(\), wanted token ids"),
            (torch.ones(2, 2, 2, dtype=torch.long), r"shape \(2, 2, 2\), wanted token ids"),
            (None, "the prompt is a NoneType"),
            (object(), "the prompt is a object"),
            (b"bytes", "the prompt is a bytes|uint8 tensor"),
            ([10**30], "the prompt is a list"),
            ([], "the prompt is empty"),
        ]),
        (PROMPT, [1, 0, 1, 1], "a 0 between two 1s"),
        (PROMPT, [1, 1], r"shape \(2,\) for a prompt of 4"),
        (PROMPT, [[1] * 4] * 2, "a row for each prompt"),
        (PROMPT, 5, "a row for each prompt"),
        (PROMPT, ["a"] * 4, "attention_mask is"),
        (PROMPT, [0] * 4, "the prompt is empty"),
    ],
)
def test_what_is_no_prompt_is_one_line(decoder, prompt, mask, message):
    with pytest.raises(UsageError, match=message):
        decoder.generate(prompt, EIGHT, attention_mask=mask)


@pytest.mark.parametrize(
    "ask",
    [
        lambda it: it.generate(torch.ones(0, 3, dtype=torch.long)),
        lambda it: it.generate({"input_ids": torch.ones(0, 3, dtype=torch.long)}),
        lambda it: it.complete([]),
        lambda it: it.batch.generate([], max_new_tokens=4),
        lambda it: it.batch.generate(torch.ones(0, 3, dtype=torch.long)),
        lambda it: it.batch.complete([], max_new_tokens=4),
        lambda it: list(it.batch.serve([])),
        lambda it: generate(it.target, torch.ones(0, 3, dtype=torch.long)),
    ],
)
def test_no_prompts_have_no_answers(shipped, ask):
    assert ask(shipped) == []


@pytest.mark.parametrize(
    ("ask", "empty"),
    [
        (lambda it: it.generate([]), "prompt"),
        (lambda it: it.generate([[]], max_new_tokens=4), "prompt"),
        (lambda it: it.generate([[5], []], max_new_tokens=4), "prompt"),
        (lambda it: it.generate({"input_ids": []}), "prompt"),
        (lambda it: it.complete(""), "prompt"),
        (lambda it: it.complete(["a", ""]), "prompt"),
        (lambda it: it.chat([]), "conversation"),
        (lambda it: it.chat([[]]), "conversation"),
        (lambda it: it.chat(["a", []]), "conversation"),
        (lambda it: it.batch.generate([[]]), "prompt"),
        (lambda it: it.batch.generate([Request([])]), "prompt"),
        (lambda it: it.batch.complete(""), "prompt"),
        (lambda it: it.batch.chat([]), "conversation"),
        (lambda it: it.batch.chat([[]]), "conversation"),
        (lambda it: generate(it.target, []), "prompt"),
        (lambda it: chat_prompt(it.tokenizer, []), "conversation"),
    ],
)
def test_a_prompt_of_nothing_is_refused(shipped, ask, empty):
    with pytest.raises(UsageError, match=f"the {empty} is empty; give at least one"):
        ask(shipped)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda it: it.complete(5), "wanted a text"),
        (lambda it: it.complete(["a", None]), "wanted a text"),
        (lambda it: it.complete("\ud800"), "cannot be encoded"),
        (lambda it: it.chat(5), "wanted messages"),
        (lambda it: it.chat([{"role": "user"}]), "wanted messages"),
        (lambda it: it.chat([{"role": "juggler", "content": ""}]), "template refuses .*juggler"),
        (lambda it: it.generate([1], input_ids=[1]), "prompts twice"),
        (lambda it: it.generate([[1], [2]], streamer=Streamer()), "one answer at a time"),
        (lambda it: it.generate([1], streamer=print), "wanted an object with put.tokens. and end"),
        (lambda it: it.generate([1], inputs_embeds=torch.ones(9, 9)), r"^.*inputs_embeds.*$"),
        *(
            (lambda _, target=target: Decoder(target), r"target is a \w+, wanted a stree.HybridM")
            for target in ("checkpoints/x", 5, torch.nn.Linear(2, 2))
        ),
    ],
)
def test_texts_and_chats_that_are_none_are_one_line(shipped, call, message):
    with pytest.raises(UsageError, match=message):
        call(shipped)


def test_without_a_tokenizer_or_a_template_that_is_said(decoder, shipped, monkeypatch):
    for call in (decoder.complete, decoder.chat):
        with pytest.raises(UsageError, match="no tokenizer"):
            call("hello")
    with pytest.raises(UsageError, match="no tokenizer"):
        _ = decoder.generate(PROMPT, EIGHT).text
    monkeypatch.setattr(shipped.tokenizer, "chat_template", None)
    with pytest.raises(UsageError, match="no chat template"):
        shipped.chat("hello")


def test_a_request_takes_either_config_and_stands_for_itself(decoder):
    wanted = decoder.generate(PROMPT, EIGHT).tokens
    theirs = transformers.GenerationConfig(max_new_tokens=8)
    requests = [Request(PROMPT, theirs), Request({"input_ids": PROMPT}, EIGHT)]
    assert [each.tokens for each in decoder.batch.generate(requests)] == [wanted] * 2
    assert decoder.batch.generate([]) == []
    with pytest.raises(UsageError, match="requests have settings of their own"):
        decoder.batch.generate(requests, max_new_tokens=4)
    with pytest.raises(UsageError, match="got 2 prompts, wanted one"):
        decoder.batch.admit(Request([PROMPT, OTHER]))


# What is shown


def test_what_a_decoder_and_its_output_say_of_themselves(decoder, shipped):
    assert repr(decoder) == (
        "Decoder(0.0 M parameters in 3 layers, drafter 0.0 M parameters in 3 layers, "
        "tree chain-2 of 3 nodes, max_length 64, answers end at no token, float64 on cpu)"
    )
    assert repr(shipped).startswith("Decoder(the target alone, 7.")
    assert repr(decoder.batch) == (
        "BatchDecoder(0.0 M parameters in 3 layers, drafter 0.0 M parameters in 3 layers, "
        "tree chain-2 of 3 nodes, 1 row, max_length 64, float64 on cpu)"
    )
    out = shipped.complete("The json module", max_new_tokens=5)
    assert repr(out).startswith(
        "GenerationOutput(5 tokens, finish_reason='length', 4 tokens after the first in"
    )
    assert f"text={out.text!r:.99}" in repr(out) and "\n" not in repr(out)
    assert "text" not in repr(decoder.generate(PROMPT, EIGHT))


def test_statistics_are_a_table():
    stats = DecodingStats(
        10, 4, 12, [0, 2, 2, 2], [0, 2, 2, 2], [2, 2, 2, 2], 2, 0.25, 0.5,
        {"draft": 100.0, "verify": 400.0},
    )
    said = "10 tokens after the first in 4 calls, τ 2.50, 20.00 tokens/s"
    assert repr(stats) == f"DecodingStats({said})"
    rows = [line.rsplit("  ", 1) for line in str(stats).splitlines()]
    assert {name.strip(): value.strip() for name, value in rows} == {
        "tokens after the first": "10", "target calls": "4", "acceptance length τ": "2.50",
        "tokens/s": "20.00", "prefill": "0.250 s", "decoding": "0.500 s",
        "draft": "0.100 s", "verify": "0.400 s",
        "calls that kept 0 drafts": "1", "calls that kept 1 draft": "0",
        "calls that kept 2 drafts": "3",
    }
    assert len({len(line) for line in str(stats).splitlines()}) == 1
    assert "τ unknown" in repr(DecodingStats())
