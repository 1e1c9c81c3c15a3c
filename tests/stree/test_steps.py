"""Steps that are decided on the device give what steps decided on the host give.

Graphs and events need CUDA, so here a captured function simply runs whenever it is replayed.
"""

import pytest
import torch
from captures import living_captures
from toys import tiny_model

from stree import Decoder, GenerationConfig, TokenTree
from stree.draft import ModelDrafter, SamplingRule
from stree.graphs import MAX_KEPT
from stree.sampling import RandomChooser
from stree.steps import DeviceSteps

pytestmark = pytest.mark.usefixtures("captured_on_cpu")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("tree", [TokenTree.chain(3), TokenTree.paper()], ids=str)
@pytest.mark.parametrize("drafted", [True, False])
def test_device_steps_equal_host_steps(tree, drafted, temperature):
    target, model = tiny_model(1), tiny_model(1)
    torch.manual_seed(0)
    for parameter in model.parameters():  # so that it is right now and then
        parameter.data += 0.1 * parameter.data.std() * torch.randn_like(parameter)
    tree = tree if drafted else TokenTree.chain(0)
    cache = target.new_cache(128, tree.num_nodes)
    drafter = ModelDrafter(model, 128, tree.num_nodes)
    choose, steps = RandomChooser(0), None
    for seed, prompt in enumerate(([5, 6, 7], [9] * 11)):
        generation = GenerationConfig(40, temperature=temperature, top_k=20, seed=seed)
        host = Decoder(target, model if drafted else None, tree if drafted else None)
        wanted = host.generate(prompt, generation)
        calls, ends = wanted.stats.accepted_per_call, wanted.stats.end_node_per_call
        if steps is None:
            rule = generation.rule
            draft = drafter.capture(tree, rule, choose) if drafted else None
            steps = DeviceSteps(target, tree, cache, draft, rule, choose)
        for each in (cache, drafter.cache):
            each.reset()
        choose.reseed(seed)
        logits = target.prefill(torch.tensor([prompt]), cache)
        drafter.catch_up(prompt)
        root = int(logits.argmax()) if rule.greedy else int(choose(rule.law(logits[0])))
        assert root == wanted.tokens[0]
        steps.begin(root)
        steps.launch(lambda phase: None)
        tokens, accepted, ended = [root], [], []
        while len(tokens) < 40:
            steps.launch(lambda phase: None)  # one ahead, as the decoder does
            finite, path, block = steps.collect()
            assert finite
            tokens += block
            accepted.append(len(block) - 1)
            ended.append(path[-1])
        assert tokens[:40] == wanted.tokens
        assert accepted[:-1] == calls[:-1]
        assert ended[:-1] == ends[:-1]
        if drafted:
            assert len(set(accepted)) > 1  # else this shows little


def test_what_is_not_finite_is_reported():
    target = tiny_model(1)
    cache = target.new_cache(16, 1)
    rule = SamplingRule(1.0)
    steps = DeviceSteps(target, TokenTree.chain(0), cache, None, rule, RandomChooser(0))
    cache.reset()
    target.prefill(torch.tensor([[1, 2]]), cache)
    target.model.norm.weight.data[0] = torch.nan
    steps.begin(3)
    steps.launch(lambda phase: None)
    assert not steps.collect()[0]


@pytest.fixture
def on_device(monkeypatch):
    """Decoders work as on a GPU."""
    monkeypatch.setattr(Decoder, "_on_device", lambda self, choose: True)


def test_graphs_of_many_rules_do_not_pile_up(on_device):
    before = living_captures()
    decoder = Decoder(tiny_model(1), tiny_model(2, attn_layers=()), TokenTree.chain(2))
    first = None
    for temperature in (*(0.5 + each / 10 for each in range(MAX_KEPT + 3)), 0.5):
        generation = GenerationConfig(6, temperature=temperature)
        tokens = decoder.generate([1, 2, 3], generation).tokens
        first = first or tokens
    assert tokens == first  # captured again
    assert len(living_captures() - before) == 2 * MAX_KEPT  # a draft and a target call each
    for other in range(MAX_KEPT):
        decoder.generate([1, 2, 3], GenerationConfig(6, temperature=3.0 + other))
        kept = living_captures()
        decoder.generate([1, 2, 3], GenerationConfig(6, temperature=0.5))
        assert living_captures() == kept  # what is used all the time stays


def test_graphs_of_many_choosers_do_not_pile_up():
    before = living_captures()
    tree, drafter = TokenTree.chain(2), ModelDrafter(tiny_model(2, attn_layers=()), 64, 3)
    for seed in range(MAX_KEPT + 3):
        choose = RandomChooser(seed)
        choose.on_cuda = True
        drafter.reset()
        drafter.draft([1, 2, 3], tree, SamplingRule(1.0), choose)
    assert len(living_captures() - before) == MAX_KEPT


def test_graphs_of_weights_that_moved_are_captured_again(on_device):
    before, generation = living_captures(), GenerationConfig(6)
    target, drafter = tiny_model(1), tiny_model(2, attn_layers=())
    decoder = Decoder(target, drafter, TokenTree.chain(2))
    decoder.generate([1, 2, 3], generation)
    old = living_captures() - before
    decoder.generate([1, 2, 3], generation)
    assert living_captures() - before == old
    for model, seed in ((target, 3), (drafter, 4)):
        other = tiny_model(seed, attn_layers=model.config.attn_layers)
        model.load_state_dict(other.state_dict(), assign=True)
        got = decoder.generate([1, 2, 3], generation).tokens
        new = living_captures() - before
        assert len(new) == 2 and not new & old
        assert got == Decoder(target, max_length=99).generate([1, 2, 3], generation).tokens
