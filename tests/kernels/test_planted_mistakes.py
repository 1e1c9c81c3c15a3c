"""Mistakes planted into the kernels that choose, draw and accept do not pass unnoticed.

What `coupled` promises is exact: tokens are plain decoding's of the same seed, and as many drafts
are accepted as with the naive twins. For the other rules see test_verification.py.
"""

import pytest
import torch
from kernel_cases import DEVICE
from planted import edited_module
from toys import TableDrafter, TableTarget

from stree import BatchDecoder, GenerationConfig, Request, TokenTree
from stree_kernels import ops
from stree_kernels.sampling import accept, top, uniforms

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter reads edited sources")
SETTINGS = [
    GenerationConfig(7, temperature=0.5, seed=3), GenerationConfig(6),
    GenerationConfig(7, temperature=3.0, seed=9),
]


def decoded(drafts: bool) -> tuple[list, list, list]:
    """Return three requests' tokens and accepted drafts in two rows, and the rows' next roots.

    The last request takes part while another is further on.
    """
    torch.manual_seed(0)
    tables = 1.5 * torch.randn(2, *[7] * 3)
    target, drafter = tables[0], tables[0] + 1.5 * tables[1]
    decoder = BatchDecoder(
        TableTarget(target), TableDrafter(drafter) if drafts else None,
        TokenTree((-1, 0, 0, 1)) if drafts else None, num_rows=2, max_length=16,
    )
    outputs = decoder.generate([Request([1, 2 + row], each) for row, each in enumerate(SETTINGS)])
    accepted = [each.stats.accepted_per_call for each in outputs]
    return [each.tokens for each in outputs], accepted, decoder.worker.state.root.tolist()


@pytest.fixture(scope="module")
def wanted():
    (plain, *_), drafted = decoded(False), decoded(True)
    tokens, accepted, _ = drafted
    assert tokens == plain and {each for row in accepted for each in row} == {0, 1, 2}
    return drafted


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(top, "SAMPLED_PIECE", 4)
    monkeypatch.setattr(top, "PIECE", 4)


def test_without_mistakes(wanted, monkeypatch):
    monkeypatch.setattr(ops, "fused", lambda *_: True)
    assert decoded(True) == wanted


MISTAKES = {
    "no temperature": (top, "value / temperature + noise", "value + noise"),
    "the noise of the position before": (top, "tl.load(depths + row) + 1", "tl.load(depths + row)"),
    "the noise of the root for all": (top, "tl.load(depths + row) + 1", "1"),
    "the neighbour's seed": (top, "seeds + sequence", "seeds + 0 * sequence"),
    "the neighbour's position": (top, "positions + sequence", "positions + 0 * sequence"),
    "the neighbour's temperature": (
        top, "= tl.load(temperatures + sequence)", "= tl.load(temperatures)",
    ),
    "pieces that all begin at 0": (top, "piece * PIECE + tl.arange", "tl.arange"),
    "siblings of one token": (top, "known = known & (token != chosen)", "known = known & True"),
    "siblings of one piece's token": (top, "taken = token == chosen", "taken = token < 0"),
    "all siblings in one place": (top, "places + row * COUNT + rank", "places + row * COUNT"),
    "one noise for two tokens": (uniforms, "(token >> 1)", "(token >> 2)"),
    "the noise of coins": (uniforms, "c0 * 0 + 1)", "c0 * 0)"),
    "the noise of the token beside": (uniforms, "(token & 1) != 0", "(token & 1) == 0"),
    "noise that is not Gumbel's": (uniforms, "-tl.log(-tl.log(uniform))", "-tl.log(uniform)"),
    "a draft of another parent": (accept, "(parent == here) & (token", "(parent >= 0) & (token"),
    "any draft": (accept, "& (token == choice)", "& (token >= 0)"),
    "one draft at most": (accept, "for step in range(longest)", "for step in range(2)"),
    "the first token as the next root": (
        accept, "root + row, choice, mask=going", "root + row, choice, mask=step == 0",
    ),
    "a position that moves by one": (accept, "position + row) + count", "position + row) + 1"),
    "the root as the whole path": (accept, "path + step, here,", "path + step, here * 0,"),
    "tokens in one place": (accept, "block + 1 + step, choice", "block + 1, choice"),
    "the neighbour's choices": (accept, "best + row * num_nodes + node", "best + node"),
    "the neighbour's drafts": (accept, "tokens + row * token_stride", "tokens + 0 * token_stride"),
}
QUICK = {"the noise of the position before", "a draft of another parent"}


@pytest.mark.costly
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.long) for each in MISTAKES],
)
def test_planted_mistake_is_caught(mistake, wanted, monkeypatch, tmp_path):
    module, line, instead = MISTAKES[mistake]
    broken = edited_module(module, line, instead, tmp_path)
    if module is uniforms:
        monkeypatch.setattr(top, "token_noise", broken.token_noise)
    for name in ("piece_kernel", "merge_kernel", "accept_kernel"):
        if hasattr(broken, name):
            monkeypatch.setattr(module, name, getattr(broken, name))
    monkeypatch.setattr(ops, "fused", lambda *_: True)
    assert decoded(True) != wanted
