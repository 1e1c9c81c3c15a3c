"""One loop for autoregressive, chain and tree; greedy output never depends on the tree."""

import random

import numpy as np
import pytest
import torch
from lanes import quick_first
from toys import Streamer, TableDrafter, TableTarget, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree, generate, metrics
from stree.batching.state import BatchState
from stree.common.errors import InvariantBroken, UsageError
from stree.drafters import Drafter, Proposal, SiblingSampling
from stree.drafters.model import ModelDrafter
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import balanced
from stree.trees.tree_batch import NOISE_STRIDE
from stree_kernels import naive

TREES = {
    "chain-1": TokenTree.chain(1),
    "chain-4": TokenTree.chain(4),
    "chain-7": TokenTree.chain(7),
    "paper": TokenTree.paper(),
    "star-6": balanced([6]),
    "binary-3": balanced([2, 2, 2]),
    "wide-top": balanced([4, 2, 1, 1]),
    "interleaved": TokenTree((-1, 0, 1, 0, 2, 3, 3, 4, 0, 7)),  # not ordered by depth
}


class Prophet(Drafter):
    """Drafter that knows what the target will say, and drafts it mostly, at a random sibling."""

    drawn = SiblingSampling.DETERMINISTIC

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocabulary: int) -> None:
        self.answers, self.vocabulary = answers, vocabulary
        self.prompts: dict[int, list[int]] = {}
        self.random = random.Random(0)

    def clear(self, row: int) -> None:
        self.prompts[row] = []

    def read(self, row: int, tokens) -> None:
        self.prompts[row] += tokens.tolist()

    def draft(self, rows, tree_batch, longest_block, bound, keep_logits) -> Proposal:
        shape = (len(rows.active), tree_batch.num_nodes)
        tokens = torch.tensor([[self.random.randrange(self.vocabulary)] * shape[1]
                               for _ in range(shape[0])])
        tokens[:, :1] = rows.block.gather(1, rows.block[:, :1])
        for row, tree in enumerate(tree_batch.trees):
            if not rows.active[row]:
                continue
            answer = self.answers[tuple(self.prompts[row])]
            done, node = int(rows.position[row]) - len(self.prompts[row]) + 1, 0
            while tree.children[node] and self.random.random() < 0.8:
                node = self.random.choice(tree.children[node])
                place = done + tree.depths[node] - 1
                if place < len(answer):
                    tokens[row, node] = answer[place]
        return Proposal(tokens)


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.long)])
def test_greedy_is_lossless_on_many_prompts(count):
    """Each prompt has 64 tokens for each of 8 trees in fp64."""
    torch.set_num_threads(1)
    config = dict(num_layers=2, attn_layers=(1,), d_model=16, num_heads=2, num_kv_heads=1,
                  num_ssm_heads=2, num_x_groups=1, num_b_groups=1, num_c_groups=2,
                  gated_norm_groups=2, intermediate_size=24)
    target = tiny_model(1, **config)
    generation = GenerationConfig(max_new_tokens=64)
    plain = BatchDecoder(target, num_rows=100, max_length=96)
    outputs = plain.generate([Request(prompt, generation) for prompt in prompts(count)])
    answers = {tuple(p): out.tokens for p, out in zip(prompts(count), outputs, strict=True)}
    one = Decoder(target, max_length=96)
    for prompt in prompts(min(count, 8)):
        assert one.generate(prompt, generation).tokens == answers[tuple(prompt)]
    prophet = Prophet(answers, target.config.vocab_size)
    decoder = BatchDecoder(target, prophet, num_rows=64, max_length=96, max_nodes=32)
    for tree in TREES.values():
        served = [Request(prompt, generation, tree) for prompt in prompts(count)]
        outputs = decoder.generate(served)
        assert [out.tokens for out in outputs] == [answers[tuple(p)] for p in prompts(count)]
        calls = sum(out.stats.num_calls for out in outputs)
        assert sum(out.stats.num_new_tokens for out in outputs) / calls > 1.2


def prompts(count: int, vocabulary: int = 61) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 20))] for _ in range(count)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("tree", quick_first([("paper",), ("interleaved",)], [("chain-4",)]))
def test_a_drafter_that_is_the_target_is_always_right(tree):
    target, tree, generation = tiny_model(1), TREES[tree], GenerationConfig(max_new_tokens=40)
    decoder, plain = Decoder(target, target, tree, max_length=128), Decoder(target, max_length=128)
    for prompt in prompts(4):
        got = decoder.generate(prompt, generation)
        assert got.tokens == plain.generate(prompt, generation).tokens
        ends = [tree.depths[node] for node in got.stats.end_node_per_call]
        assert ends == got.stats.accepted_per_call
        assert ends[:-1] == [tree.max_depth] * (got.stats.num_calls - 1)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "tree, attn_layers, temperature",
    quick_first(
        [(tree, (1,), 1.0) for tree in TREES] + [("paper", (), 0.0), ("paper", (0, 1), 0.0)],
        [(tree, layers, temperature) for tree in TREES for layers in ((), (1,), (0, 1))
         for temperature in (0.0, 1.0)],
    ),
)
def test_drafts_follow_from_the_whole_sequence(tree, attn_layers, temperature):
    """Children come from the drafter's logits after the sequence and their path.

    Their noise is their own if they are judged by these logits.
    """
    model, tree = tiny_model(4, num_layers=2, attn_layers=attn_layers), TREES[tree]
    drafter, sequence = ModelDrafter(model, 1, 64, 32), [5, 6, 7]
    drafter.read(0, torch.tensor(sequence))
    generation = GenerationConfig(temperature=temperature, seed=4)
    rows, tree_batch = BatchState.new(1, 32), make_tree_batch([tree], torch.device("cpu"))
    rows.set(0, generation)
    rows.active[0] = True
    rows = rows.narrow(0, 1, [generation])
    for news in ([8], [9], list(range(tree.max_depth + 1)), [3, 1]):  # certain since the last draft
        sequence += news
        rows.position[0] = len(sequence) - 1
        rows.block[0, : 1 + len(news)] = torch.tensor([len(news), *news])
        with torch.no_grad():
            draft = drafter.draft(rows, tree_batch, 8, 64, keep_logits=True)
        assert draft.finite.all() and draft.tokens[0, 0] == sequence[-1]
        for node, children in enumerate(tree.children):
            if not children:
                continue
            path = draft.tokens[0, tree.path_to(node)[1:]].tolist()
            with torch.no_grad():
                logits = model(torch.tensor([sequence + path]))[0, -1]
            drawn_from = draft.logits[0, tree_batch.drawn_by[0, node]]
            torch.testing.assert_close(drawn_from, logits, rtol=0, atol=1e-9)
            if temperature:
                position = torch.tensor([[len(sequence) + node * NOISE_STRIDE]])  # a node's own
                logits = logits + naive.token_noise(torch.tensor([4]), position, 61)[0, 0]
            best = logits.topk(len(children)).indices
            assert draft.tokens[0, list(children)].equal(best)


def counting_target(vocabulary: int = 12, eos: tuple[int, ...] = ()) -> TableTarget:
    """Return a target that says t + 1 after token t."""
    table = torch.full((vocabulary,) * 3, -5.0, dtype=torch.float64)
    for token in range(vocabulary):
        table[:, token, (token + 1) % vocabulary] = 5.0
    return TableTarget(table, eos)


def test_drafter_that_is_always_never_and_sometimes_right():
    target = counting_target()
    generation = GenerationConfig(max_new_tokens=9)
    always = Decoder(target, TableDrafter(target.table), TokenTree.chain(3)).generate(
        [0, 1], generation
    )
    assert always.tokens == list(range(2, 11))
    assert always.stats.accepted_per_call == [3, 3] and always.stats.num_new_tokens == 8
    never = TableDrafter(-target.table)
    out = Decoder(target, never, TokenTree.chain(3)).generate([0, 1], generation)
    assert out.tokens == list(range(2, 11)) and out.stats.accepted_per_call == [0] * 8
    knows_odd = target.table.clone()
    knows_odd[:, 1::2] *= -1
    out = Decoder(target, TableDrafter(knows_odd), TokenTree.chain(3)).generate([0, 1], generation)
    assert out.tokens == list(range(2, 11)) and out.stats.accepted_per_call == [1, 1, 1, 1]


@pytest.mark.parametrize("most", range(2, 12))
def test_a_perfect_drafter_is_never_rejected_wherever_the_answer_stops(most):
    target = counting_target()
    decoder = Decoder(target, TableDrafter(target.table), TokenTree.chain(3))
    for stop in (GenerationConfig(most), GenerationConfig(11, eos_token_id=most)):
        stats = decoder.generate([0, 1], stop).stats
        assert set(metrics.depth_accept_rates([stats]).values()) <= {1.0}
        assert metrics.end_nodes([stats]) == metrics.open_ends([stats])


def test_a_rejection_right_before_the_stop_counts_and_one_after_it_does_not():
    target = counting_target()
    wrong_at_4 = target.table.clone()
    wrong_at_4[:, 3] *= -1  # the first token is 2, and the drafts are 3 and a wrong one
    decoder = Decoder(target, TableDrafter(wrong_at_4), TokenTree.chain(3))
    depths = {most: decoder.generate([0, 1], GenerationConfig(most)).stats for most in (2, 3)}
    assert [(s.accepted_per_call, s.depth_per_call) for s in depths.values()] == [
        ([1], [1]), ([1], [3]),
    ]


def test_the_end_of_each_accepted_path_is_recorded_by_node():
    target = counting_target()
    second = target.table.clone()
    for token in range(12):
        second[:, token, (token + 2) % 12] = 6.0  # its first choice is wrong, its second right
    tree = TokenTree((-1, 0, 0, 1, 2, 2))
    out = Decoder(target, TableDrafter(second), tree).generate([0, 1], GenerationConfig(8))
    assert out.stats.end_node_per_call == [5, 5, 2]  # the last is cut at its first draft
    assert out.stats.accepted_per_call == [2, 2, 1] == out.stats.depth_per_call
    plain = Decoder(target).generate([0, 1], GenerationConfig(4))
    assert plain.stats.end_node_per_call == [0, 0, 0]


def test_eos_inside_an_accepted_block_stops_there():
    target = counting_target(eos=(5,))
    decoder = Decoder(target, TableDrafter(target.table), TokenTree.chain(4))
    out = decoder.generate([0, 1], GenerationConfig(max_new_tokens=50))
    assert out.tokens == [2, 3, 4, 5] and out.finish_reason == "eos"
    assert out.stats.accepted_per_call == [3] and out.stats.num_new_tokens == 3
    out = decoder.generate([0, 1], GenerationConfig(max_new_tokens=8, ignore_eos=True))
    assert out.tokens == [2, 3, 4, 5, 6, 7, 8, 9] and out.finish_reason == "length"
    out = decoder.generate([0, 1], GenerationConfig(max_new_tokens=50, eos_token_id=[7, 4]))
    assert out.tokens == [2, 3, 4]


def test_length_limit_inside_a_block():
    target = counting_target()
    decoder = Decoder(target, TableDrafter(target.table), TokenTree.chain(4))
    for limit in range(1, 12):
        out = decoder.generate([0, 1], GenerationConfig(max_new_tokens=limit))
        assert len(out.tokens) == limit and out.finish_reason == "length"
        assert out.stats.num_new_tokens == limit - 1


@pytest.mark.parametrize(
    "eos",
    [5, [7, 5], (5,), {5}, torch.tensor(5), torch.tensor([5, 7]), np.int64(5), np.array([9, 5]),
     [np.uint8(5)]],
    ids=repr,
)
def test_any_whole_number_is_an_eos(eos):
    decoder = Decoder(counting_target(), max_length=99)
    out = decoder.generate([0, 1], GenerationConfig(max_new_tokens=9, eos_token_id=eos))
    assert out.tokens == [2, 3, 4, 5] and out.finish_reason == "eos"


class Pieces:
    """Tokenizer whose tokens are several letters long."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(self.pieces[token % len(self.pieces)] for token in tokens)

    def convert_ids_to_tokens(self, token):
        return self.decode([token])


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("stop", ["f", "ef", "efg", "g", "-h", "b-", "cdefg", "-hab-"])
def test_stop_strings_end_at_the_first_token_that_completes_them(stop, depth):
    """Stop strings may go across blocks, and end inside a token."""
    pieces = Pieces("ab-", "cd", "efg", "-h")
    target = counting_target()
    drafter = TableDrafter(target.table) if depth else None
    decoder = Decoder(target, drafter, TokenTree.chain(depth), tokenizer=pieces)
    asked = GenerationConfig(12, stop_strings=("xy", stop), ignore_eos=True)
    out = decoder.generate([6, 7], asked)
    tokens = [token % 12 for token in range(8, 20)]
    wanted = next(n for n in range(1, 13) if stop in pieces.decode(tokens[:n]))
    assert out.tokens == tokens[:wanted] and out.finish_reason == "stop_string"
    with pytest.raises(UsageError, match="tokenizer"):
        Decoder(target).generate([6, 7], asked)


class Sentence(Pieces):
    """Tokenizer that drops a space at the beginning of what it decodes, as SentencePiece does."""

    def decode(self, tokens, skip_special_tokens=False):
        return super().decode(tokens).removeprefix(" ")


@pytest.mark.parametrize("stop", [" ", " b", "b ", " b a"])
def test_a_stop_string_may_begin_with_a_space(stop):
    """The space is dropped only where the text begins, not where the rule begins to decode."""
    letters, target = Sentence("a", " ", "b", " "), counting_target()
    asked = GenerationConfig(12, stop_strings=(stop,), ignore_eos=True)
    out = Decoder(target, tokenizer=letters).generate([6, 7], asked)
    wanted = next(n for n in range(1, 13) if stop in letters.decode(range(8, 8 + n)))
    assert len(out.tokens) == wanted and out.finish_reason == "stop_string"


def test_streamer_gets_prompt_and_blocks():
    target, streamer = counting_target(), Streamer()
    decoder = Decoder(target, TableDrafter(target.table), TokenTree.chain(2), max_length=16)
    decoder.generate([0, 1], GenerationConfig(max_new_tokens=6), streamer=streamer)
    assert streamer.values == [[0, 1], [2], [3, 4, 5], [6, 7]] and streamer.ended


def test_whoever_reads_a_streamer_is_told_of_the_end_after_an_error_too():
    target, generation = tiny_model(1), GenerationConfig(8)

    def fails(during, *arguments, **options):
        streamer = Streamer()
        with pytest.raises((UsageError, InvariantBroken)):
            during(*arguments, streamer=streamer, **options)
        assert streamer.ended == 1

    fails(Decoder(target, max_length=99).generate, "hello", generation)
    fails(Decoder(target, max_length=9).generate, [1, 2], generation)
    fails(Decoder(target, max_length=99).generate, [], generation)
    target.model.norm.weight.data[0] = torch.nan
    fails(Decoder(target, max_length=99).generate, [1, 2], generation)
    streamer = Streamer()
    Decoder(tiny_model(1), max_length=99).generate([1, 2], generation, streamer=streamer)
    assert streamer.ended == 1


def test_a_request_without_a_seed_gets_a_fresh_one_that_repeats_it():
    target, drafter = tiny_model(1), tiny_model(2, attn_layers=())
    sampled = GenerationConfig(12, temperature=1.0)
    decoder = Decoder(target, drafter, max_length=128)
    batch = BatchDecoder(target, num_rows=2, max_length=128)
    outputs = [decoder.generate([1, 2, 3], sampled) for _ in range(2)]
    outputs += [decoder.generate([1, 2, 3], sampled, seed=None)]
    outputs += batch.generate([Request([1, 2, 3], sampled)] * 2)
    outputs += batch.generate([[1, 2, 3]] * 2, sampled)
    assert (
        len({each.seed for each in outputs}) == len({tuple(each.tokens) for each in outputs}) == 7
    )
    for each in outputs:
        assert decoder.generate([1, 2, 3], sampled, seed=each.seed).tokens == each.tokens
        assert f"seed={each.seed}" in repr(each)
    assert decoder.generate([1, 2, 3], GenerationConfig(4)).seed is None


@pytest.mark.parametrize("penalty", [1e-5, 1e5])
def test_the_most_extreme_penalties_leave_logits_finite(penalty):
    for temperature in (0.0, 1e-5, 1.0):
        asked = GenerationConfig(9, temperature, repetition_penalty=penalty, top_k=2**63 - 1)
        assert len(Decoder(tiny_model(1), max_length=64).generate([1, 2, 3], asked).tokens) == 9


def test_nan_is_named_with_layer_and_step():
    target = tiny_model(1)
    with torch.no_grad():
        target.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(InvariantBroken, match=r"target.*step 0.*layers\.1\.self_attn\.v_proj"):
        Decoder(target, max_length=99).generate([1, 2], GenerationConfig(8))
    drafter = tiny_model(2, attn_layers=())
    with torch.no_grad():
        drafter.model.norm.weight[3] = torch.inf
    with pytest.raises(InvariantBroken, match=r"drafter.*step 0.*model\.norm"):
        Decoder(tiny_model(1), drafter, max_length=99).generate([1, 2], GenerationConfig(8))
    target = tiny_model(1, torch.float32)
    with torch.no_grad():
        target.model.layers[2].mlp.down_proj.weight.fill_(1e38)
    with pytest.raises(InvariantBroken, match=r"target.*step 0.*overflow in layer 2"):
        Decoder(target, max_length=99).generate([1, 2], GenerationConfig(8))


def test_a_root_alone_needs_no_drafter_and_prompts_may_be_tensors():
    target, drafter = tiny_model(1), tiny_model(2, attn_layers=())
    decoder = Decoder(target, drafter, TokenTree.chain(0), max_length=99)
    alone = Decoder(target, max_length=99)
    got = decoder.generate(torch.tensor([[1, 2, 3]]), GenerationConfig(8))
    for prompt in ([1, 2, 3], torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]])):
        assert got.tokens == alone.generate(prompt, GenerationConfig(8)).tokens
    assert got.stats.accepted_per_call == [0] * 7


def test_generate_makes_a_decoder_that_is_long_enough():
    target = tiny_model(1)
    alone = Decoder(target, max_length=99)
    for inputs in ([1, 2], [[1, 2], [3]]):
        outputs = generate(target, inputs, max_new_tokens=8)
        expected = alone.generate(inputs, max_new_tokens=8)
        outputs, expected = (
            each if isinstance(each, list) else [each] for each in (outputs, expected)
        )
        assert [out.tokens for out in outputs] == [out.tokens for out in expected]
