"""Types of the doors, as a type checker finds them from outside of the repository."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

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
