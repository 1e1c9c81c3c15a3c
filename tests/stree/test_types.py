"""Types of the doors, as a type checker finds them from outside of the repository."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from stree import GenerationConfig
from stree.generation import GenerationOptions

PROGRAM = """\
from stree import Decoder, from_transformers, generate, load
from stree_kernels import ops

decoder: Decoder = load("checkpoint")
question = [{"role": "user", "content": "a"}]
reveal_type(decoder.generate([1, 2, 3]))  # one
reveal_type(decoder.generate([[1, 2, 3], [4]]))  # list
reveal_type(decoder.generate([1, 2, 3], num_return_sequences=3))  # list
reveal_type(decoder.complete("a"))  # one
reveal_type(decoder.complete(["a", "b"]))  # list
reveal_type(decoder.complete("a", num_return_sequences=2))  # list
reveal_type(decoder.chat("a", temperature=1.0))  # one
reveal_type(decoder.chat(question))  # one
reveal_type(decoder.chat(["a", question]))  # list
reveal_type(decoder.chat("a", num_return_sequences=2, enable_thinking=False))  # list
reveal_type(generate(decoder.target, [1, 2]))  # one
reveal_type(generate(decoder.target, [[1, 2]]))  # list
reveal_type(from_transformers(None).generate())  # tensor
reveal_type(ops.current)  # known
"""
TYPES = {
    "one": "stree.generation.GenerationOutput",
    "list": "list[stree.generation.GenerationOutput]",
    "tensor": "torch._tensor.Tensor",
    "known": "def (device: torch._C.device) -> torch.cuda.device",
}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_type_checkers_follow_an_import_from_any_folder(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "program.py"],
        cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True,
    )
    got = re.findall(r'note: Revealed type is "(.*)"', checked.stdout)
    assert got == [TYPES[each] for each in re.findall("# (.*)", PROGRAM)], checked.stdout


WRONG = """\
from stree import BatchDecoder, Decoder, generate, load

decoder: Decoder = load("checkpoint")
batch: BatchDecoder = decoder.batch
decoder.generate([1], max_new_token=3)
decoder.generate([1], temperature="warm")
decoder.complete("a", top_p="0.9")
decoder.complete("a", stop=["b"])
decoder.chat("a", seed=1.5)
decoder.chat("a", enable_thinking=False, stop_strings=3)
generate(decoder.target, [1], top_k=0.5)
batch.generate([[1]], top_kk=3)
batch.complete(["a"], min_p="a")
batch.chat(["a"], ignore_eos=3)
"""
RIGHT = """\
from stree import BatchDecoder, Decoder, generate, load

decoder: Decoder = load("checkpoint")
batch: BatchDecoder = decoder.batch
decoder.generate(input_ids=[1], attention_mask=[1], do_sample=True, max_length=9, streamer=None)
decoder.complete("a", stop_strings="b", temperature=1, seed=None, eos_token_id=[1, 2])
decoder.chat("a", enable_thinking=False, stop_strings=["b"], tools=[], ignore_eos=True)
generate(decoder.target, [1], drafter=None, tokenizer=None, top_k=5, repetition_penalty=1.1)
batch.generate(input_ids=[[1]], num_return_sequences=2, temperature=0.5, min_p=0.1)
batch.complete(["a"], top_p=0.9)
batch.chat(["a"], tools=[], max_new_tokens=3)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_type_checkers_refuse_a_setting_of_a_wrong_name_or_type(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "wrong.py", "right.py"],
        cwd=tmp_path, env={"PATH": ""}, capture_output=True, text=True,
    )
    errors = set(re.findall(r"(\w+).py:(\d+): error", checked.stdout))
    calls = range(5, WRONG.count("\n") + 1)
    assert errors == {("wrong", str(line)) for line in calls}, checked.stdout


def test_the_typed_options_are_the_settings_of_a_generation():
    settings = {each.name for each in dataclasses.fields(GenerationConfig)}
    assert GenerationOptions.__annotations__.keys() == settings | {"do_sample", "max_length"}


def test_a_call_that_asks_for_answers_by_number_gives_a_list():
    from toys import tiny_model

    from stree import Decoder, generate

    target = tiny_model(1)
    for door in (
        Decoder(target, max_length=32).generate,
        lambda *a, **k: generate(target, *a, **k),
    ):
        (one,) = door([1, 2], max_new_tokens=3, num_return_sequences=1)
        assert one.tokens == door([1, 2], max_new_tokens=3).tokens
