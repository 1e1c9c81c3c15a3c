"""The chat in the terminal: what streams in which colour, and what is typed."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from pseudo_terminal import CTRL_C, run_on_terminal
from rich.console import Console
from toys import right_now_and_then

from stree import Decoder, GenerationConfig, TextStream, TokenTree
from stree.checkpoints.load_save import load_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.prompts import chat_prompt
from stree_pipelines.commands.chat import Chat, main, typed_lines

SHIPPED = Path(__file__).parents[2] / "checkpoints/python-docs-hybrid"
CTRL_D = b"\x04"
GREEN = re.compile(r"\x1b\[32m(.*?)\x1b\[0m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
FIGURES = re.compile(r"τ (\d\.\d\d) · \d+\.\d tokens/s · (.*)")


@pytest.fixture(scope="module")
def target():
    return load_model(SHIPPED, torch.device("cpu"), torch.float32)


@pytest.fixture
def tokenizer():
    return load_tokenizer(SHIPPED)


def chat_of(decoder: Decoder, **options) -> tuple[Chat, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system="standard")
    return Chat(decoder, GenerationConfig(**options), console), shown


def told(chat: Chat, shown: io.StringIO, line: str) -> str:
    shown.seek(0)
    shown.truncate()
    chat.obey(line)
    return shown.getvalue()


def test_accepted_drafts_are_in_colour_and_the_text_is_plain_decoding_s(target, tokenizer):
    """Drafts of the target's own weights with noise: some are accepted, and every coloured word is
    one of those that the statistics count."""
    drafter = right_now_and_then(target)
    tree = TokenTree.chain(3)
    decoder = Decoder(target, drafter, tree, max_length=256, tokenizer=tokenizer)
    generation = GenerationConfig(max_new_tokens=20, temperature=1.0, seed=0)
    wanted = decoder.chat("What is a list?", generation)
    drafts, at = [], 1  # behind the token of the prompt's step
    for num_accepted in wanted.stats.accepted_per_call:
        drafts += wanted.tokens[at : at + num_accepted]
        at += num_accepted + 1
    assert 0 < len(drafts) < len(wanted.tokens) - 1

    chat, shown = chat_of(decoder, max_new_tokens=20, temperature=1.0, seed=0)
    fast = told(chat, shown, "What is a list?")
    *answer, figures = fast.rstrip("\n").split("\n")
    assert "".join(GREEN.findall("\n".join(answer))) == tokenizer.decode(
        drafts, skip_special_tokens=True
    )
    assert ESCAPE.sub("", "\n".join(answer)) == wanted.text
    found = FIGURES.fullmatch(ESCAPE.sub("", figures))
    assert found.groups() == (f"{wanted.stats.acceptance_length:.2f}", "tree chain-3 · seed 0")
    assert chat.messages[-1] == {"role": "assistant", "content": wanted.text}

    assert "plain decoding" in told(chat, shown, "/plain")
    slow = told(chat, shown, "/again")
    assert ESCAPE.sub("", slow).startswith(wanted.text) and not GREEN.search(slow)
    assert "τ 1.00" in slow and ESCAPE.sub("", slow).endswith(" · plain · seed 0\n")
    assert len(chat.messages) == 2
    assert "decoding with chain-3" in told(chat, shown, "/plain")


def test_a_conversation_grows_and_is_forgotten(target, tokenizer):
    decoder = Decoder(target, max_length=64, tokenizer=tokenizer, num_prefixes=2)
    chat, shown = chat_of(decoder, max_new_tokens=4)
    assert "nothing was asked yet" in told(chat, shown, "/again")
    assert "decoding is plain anyway" in told(chat, shown, "/plain")
    first = told(chat, shown, "a")
    goes_on = chat_prompt(tokenizer, [*chat.messages, {"role": "user", "content": "b"}]).ids
    asked = chat_prompt(tokenizer, chat.messages[:1]).ids
    assert decoder.num_reusable(goes_on) > len(asked)  # what was read is not read again
    told(chat, shown, "b")
    assert [each["content"] for each in chat.messages if each["role"] == "user"] == ["a", "b"]
    refused = told(chat, shown, "what " * 60)
    assert "max_length" in refused and "/reset forgets" in refused and len(chat.messages) == 4
    assert "Ctrl-D leaves" in told(chat, shown, "/unknown")
    told(chat, shown, "/reset")
    again = told(chat, shown, "a")
    assert again.splitlines()[0] == first.splitlines()[0] and len(chat.messages) == 2


def test_without_a_template_a_line_is_gone_on_after(target, tokenizer):
    tokenizer.chat_template = None
    decoder = Decoder(target, max_length=64, tokenizer=tokenizer)
    chat, shown = chat_of(decoder, max_new_tokens=6)
    chat.welcome()
    assert "each line is a text to go on after" in shown.getvalue()
    assert f"answers end at {decoder.eos_token_ids[0]}" in " ".join(shown.getvalue().split())
    assert "about nothing" in ESCAPE.sub("", shown.getvalue())
    for _ in range(2):  # the second knows nothing of the first
        shown_text = ESCAPE.sub("", told(chat, shown, "The json module"))
        assert shown_text.startswith(decoder.complete("The json module", max_new_tokens=6).text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\x1b[2Jb\x07\x08\x7f\x9b", "a\ufffd[2Jb" + 4 * "\ufffd"),
        ("a\u202eb\u2066c", "a\ufffdb\ufffdc"),
        ("one\r\ntwo\rthree\r", "one\ntwo\nthree\n"),
    ],
    ids=["controls", "bidi", "returns"],
)
def test_a_terminal_is_not_moved(target, tokenizer, monkeypatch, text, wanted):
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert answered_with(tokens, target, tokenizer, monkeypatch) == wanted


def test_an_answer_ends_with_its_unfinished_character(target, tokenizer, monkeypatch):
    tokens = tokenizer("ok 🙂", add_special_tokens=False).input_ids
    assert answered_with(tokens[:-1], target, tokenizer, monkeypatch) == "ok \ufffd"


def answered_with(tokens: list[int], target, tokenizer, monkeypatch) -> str:
    """Return what a chat shows of an answer of these tokens."""
    decoder = Decoder(target, max_length=64, tokenizer=tokenizer)
    chat, shown = chat_of(decoder, max_new_tokens=len(tokens), ignore_eos=True)
    add, left = TextStream.add, list(tokens)
    monkeypatch.setattr(TextStream, "add", lambda stream, token: add(stream, left.pop(0)))
    answer, _, _ = told(chat, shown, "a").rsplit("\n", 2)
    assert not left
    return answer


def test_ctrl_c_drops_a_line_and_ctrl_d_ends_them(monkeypatch):
    typed: list = [" a ", "", KeyboardInterrupt(), "/plain", EOFError()]

    def read(prompt: str) -> str:
        each = typed.pop(0)
        if isinstance(each, BaseException):
            raise each
        return each

    monkeypatch.setattr("builtins.input", read)
    assert list(typed_lines(Console(file=io.StringIO()))) == ["a", "/plain"] and not typed


def test_wrong_settings_are_one_line(tmp_path):
    for more, message in (
        (["--temperature", "-1"], "temperature is -1"),
        (["--device", "gpu"], "device is 'gpu', wanted"),
        (["--dtype", "int8"], "dtype is 'int8', wanted"),
        (["--tree", "paper"], "needs a drafter"),
        (["--drafter", str(tmp_path / "absent")], "no folder"),
        (["--verifier", "greedy"], "coupled is the default"),
        (["--drafter", "ngram:3", "--tree", "paper", "--verifier", "block"], "chains only"),
        (["--backtracking", "copies"], "wanted one of replay, joint"),
    ):
        with pytest.raises(ValueError, match=message):
            main([str(SHIPPED), *more])


@pytest.mark.costly
def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(target, tokenizer):
    decoder = Decoder(target, max_length=64, tokenizer=tokenizer)
    opening = decoder.chat("What is a list?", max_new_tokens=4).text
    command = [sys.executable, "-m", "stree", "chat", str(SHIPPED), "--drafter", str(SHIPPED),
               "--tree", "chain-2", "--max_new_tokens", "1500", "--device", "cpu"]
    shown = run_on_terminal(command, 160, keys=[
        ("Ctrl-D leaves", b"What is a list?\n"),
        ("\x1b[32m", CTRL_C),
        (" · stopped\x1b[0m\r\n> ", b"half a li\t"),  # the key drops it, and switches
        ("plain decoding", b"/again\n"),
        (opening, CTRL_C),
        (" · stopped\x1b[0m\r\n> ", CTRL_D),  # at the prompt: before, it would be no end
    ])
    assert shown.code == 0, shown.lines
    figures = [found for found in map(FIGURES.fullmatch, shown.lines) if found]
    assert [found[2] for found in figures] == ["tree chain-2 · stopped", "plain · stopped"]
    assert float(figures[0][1]) > 2 and figures[1][1] == "1.00"  # the target drafts for itself
    assert "Traceback" not in shown.raw
