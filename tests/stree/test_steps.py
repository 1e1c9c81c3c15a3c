"""Steps that are decided on the device give what steps decided on the host give.

Graphs and events need CUDA, so here a captured function simply runs whenever it is replayed.
"""

import pytest
import torch
from toys import tiny_model

import stree.draft
import stree.steps
from stree import Decoder, GenerationConfig, TokenTree
from stree.draft import ModelDrafter, SamplingRule
from stree.sampling import RandomChooser
from stree.steps import GreedySteps


class Replayed:
    """Stands in for `Capture`: static outputs, written by each replay."""

    def __init__(self, function, rehearsal, generators=()):
        rehearsal()
        self.function, self.outputs = function, function()

    def replay(self):
        new = self.function()
        if isinstance(new, torch.Tensor):
            return self.outputs.copy_(new)
        self.outputs.tokens.copy_(new.tokens)
        self.outputs.finite.copy_(new.finite)
        return self.outputs


class Event:
    def record(self): ...

    def synchronize(self): ...


@pytest.mark.parametrize("tree", [TokenTree.chain(3), TokenTree.paper()], ids=str)
@pytest.mark.parametrize("drafted", [True, False])
def test_device_steps_equal_host_steps(monkeypatch, tree, drafted):
    monkeypatch.setattr(stree.steps, "Capture", Replayed)
    monkeypatch.setattr(stree.draft, "Capture", Replayed)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    target, model = tiny_model(1), tiny_model(1, num_layers=2, attn_layers=())
    tree = tree if drafted else TokenTree.chain(0)
    cache = target.new_cache(128, tree.num_nodes)
    drafter = ModelDrafter(model, 128, tree.num_nodes)
    steps = None
    for prompt in ([5, 6, 7], [9] * 11):
        # An autoregressive run says what the tokens are
        wanted = Decoder(target, max_length=128).generate(prompt, GenerationConfig(40)).tokens
        host = Decoder(target, model if drafted else None, tree if drafted else None)
        stats = host.generate(prompt, GenerationConfig(40)).stats
        calls, ends = stats.accepted_per_call, stats.end_node_per_call
        if steps is None:
            draft = drafter.capture(tree, SamplingRule(), RandomChooser(0)) if drafted else None
            steps = GreedySteps(target, tree, cache, draft)
        for each in (cache, drafter.cache):
            each.reset()
        target.prefill(torch.tensor([prompt]), cache)
        drafter.catch_up(prompt)
        steps.begin(wanted[0])
        steps.launch(lambda phase: None)
        tokens, accepted, ended = wanted[:1], [], []
        while len(tokens) < 40:
            steps.launch(lambda phase: None)  # one ahead, as the decoder does
            finite, path, block = steps.collect()
            assert finite
            tokens += block
            accepted.append(len(block) - 1)
            ended.append(path[-1])
        assert tokens[:40] == wanted
        assert accepted[:-1] == calls[:-1]
        assert ended[:-1] == ends[:-1]
