"""Layers of every kind through the fused kernels: whole tree calls beside plain PyTorch's.

What an op's own test does not see is how layers use them: joined biases, positions on a part of a
head, a scale of the scores, blocks side by side, and weights packed before the call.
"""

import pytest
import torch
from eagle_heads import save_head
from families import FAMILIES, TRANSFORMERS, random_reference
from kernel_cases import DEVICE, comb, relative_error
from lanes import costly, quick_first
from mtp_heads import save_with_head
from watched import watch

from stree.batching.prefillers import ChunkedPrefill, PromptCall
from stree.batching.runners import EagerRunner
from stree.batching.state import BatchState
from stree.checkpoints.load_save import load_model
from stree.decoder import Decoder
from stree.drafters.model import ModelDrafter
from stree.drafters.names import DrafterName
from stree.generation import GenerationConfig
from stree.logits.asked import Asked
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.models.slicing import share_ends
from stree.trees.build import make_tree_batch
from stree.trees.token_tree import TokenTree, as_tree
from stree_kernels import ops

SEEDS = {"nemotron": 3, "granite": 3, "zamba": 1, "qwen3_5": 1, "olmo_hybrid": 1}
# In a short run; `make test` has the first
SHORT = ("bamba", "qwen3_5", "gpt_neox", "falcon", "olmo_hybrid", "mistral")


@pytest.fixture
def fused(monkeypatch):
    """Serve by the kernels or not, whatever the device."""
    own = ops.fused
    state = {"on": False}

    def choose(device, dtype, largest_dim=0):
        return state["on"] and (device.type != "cuda" or own(device, dtype, largest_dim))

    monkeypatch.setattr(ops, "fused", choose)
    return state


def two_calls(model, tree):
    """Return logits of a tree, and of another one after a path of it."""
    cache = model.new_cache(max_length=32, max_nodes=tree.num_nodes)
    model.prefill(torch.arange(5, device=DEVICE)[None], cache)
    nodes = torch.arange(tree.num_nodes, device=DEVICE)[None] + 7
    first = model.tree_forward(nodes, tree, cache)
    cache.commit(tree.path_to(tree.num_nodes - 1))
    return first, model.tree_forward(nodes + 11, tree, cache)


@pytest.mark.parametrize(
    "family",
    [
        SHORT[0], *map(costly, SHORT[1:]),
        *(pytest.param(family, marks=pytest.mark.long)
          for family in (*FAMILIES, *TRANSFORMERS) if family not in SHORT),
    ],
)
@torch.no_grad()
def test_families(tmp_path, fused, family):
    random_reference(family, SEEDS.get(family, 0)).save_pretrained(tmp_path)
    model = load_model(tmp_path, DEVICE)
    wanted = two_calls(model, comb(5))
    fused["on"] = True
    for got, each in zip(two_calls(model, comb(5)), wanted, strict=True):
        assert relative_error(got, each) < 1e-4


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_a_head_of_the_target(tmp_path, fused, monkeypatch, kind):
    """It reads a prompt in chunks, drafts levels after each other, and takes accepted features."""
    monkeypatch.setattr("stree.engine.worker.runner_of", EagerRunner)
    monkeypatch.setattr("stree.batching.runners.Prefiller", lambda: ChunkedPrefill(PromptCall))
    theirs, _ = save_with_head(tmp_path, "qwen3_5", 0)
    save_head(tmp_path / "eagle", theirs, layers=[1, 2], whole_head=True)
    logits = []
    for fused["on"] in (False, True):
        target = load_model(tmp_path, DEVICE)
        drafter = DrafterName.parse("mtp" if kind == "mtp" else f"eagle:{tmp_path / 'eagle'}").load(
            tmp_path, DEVICE, torch.float32
        )
        assert drafter is not None
        share_ends(drafter, target)
        watched = watch(drafter, 1, 32, 7)
        decoder = Decoder(target, watched, as_tree("expand-2-2"), max_length=32)
        decoder.generate([7, 3, 0, 1], GenerationConfig(6, ignore_eos=True))
        logits.append(torch.cat([each[-1] for each in watched.drafts]))
    assert relative_error(logits[1], logits[0]) < 1e-4


@pytest.mark.parametrize("mixers", [costly("attention"), "mamba+attention"])
@torch.no_grad()
def test_weights_are_packed_once_and_moved_ones_are_noticed(fused, mixers):
    config = HybridConfig(
        vocab_size=17, d_model=16, num_layers=2, layer_types=("mamba mlp", f"{mixers} mlp"),
        intermediate_size=24,
        num_heads=2, num_kv_heads=1, head_dim=8, attention_bias=True, num_ssm_heads=2,
        ssm_head_dim=8, d_state=8, num_x_groups=1, num_b_groups=1, num_c_groups=2,
    )
    model, tree = HybridModel(config).to(DEVICE).eval(), TokenTree.chain(1)
    nodes = torch.arange(2, device=DEVICE)[None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fused["on"] = True
    cache = model.new_cache(16, 2)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    wanted = model.tree_forward(nodes, tree, cache)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    attention = model.model.layers[1].self_attn
    for name in ("weight", "bias"):  # written in place, they are what the call reads
        getattr(attention.v_proj, name).mul_(2)
    cache.clear()
    written = model.tree_forward(nodes, tree, cache)
    assert not torch.equal(written, wanted)
    cache.clear()
    attention.v_proj.weight.data = attention.v_proj.weight.data.clone()
    assert torch.equal(model.tree_forward(nodes, tree, cache), written)
    cache.clear()
    attention.v_proj.weight.mul_(2)  # what has moved is what the next call reads, too
    assert not torch.equal(changed := model.tree_forward(nodes, tree, cache), written)
    cache.clear()
    attention.o_proj.weight.data = attention.o_proj.weight.data.contiguous()
    assert torch.equal(model.tree_forward(nodes, tree, cache), changed)
    cache.clear()
    attention.o_proj.weight.mul_(2)
    assert not torch.equal(model.tree_forward(nodes, tree, cache), changed)
    cache.clear()
    model.load_state_dict(before, assign=True)
    torch.testing.assert_close(model.tree_forward(nodes, tree, cache), wanted)
    model.model.layers[0].mamba.out_proj.weight.zero_()  # of one that is not joined, too
    cache.clear()
    assert not torch.allclose(model.tree_forward(nodes, tree, cache), wanted)


@pytest.mark.costly
@pytest.mark.parametrize("sampled", quick_first([(True,)], [(False,)]))
@torch.no_grad()
def test_drafts_of_a_small_model(fused, sampled):
    """In 16 bits its norms are no launches, and its head is multiplied where its tokens are chosen.
    Embeddings are large and few, so that rounding decides nothing; in the second draft one of the
    rows is idle."""
    config = HybridConfig(
        vocab_size=24, d_model=64, num_layers=2, intermediate_size=96, tie_embeddings=True,
        num_ssm_heads=4, ssm_head_dim=16, d_state=16, num_x_groups=2, num_b_groups=2,
        num_c_groups=4, gated_norm_groups=4,
    )
    torch.manual_seed(0)
    model, tree = HybridModel(config).to(DEVICE).eval(), TokenTree.paper()
    for name, weight in model.named_parameters():
        if name.endswith("proj.weight"):
            weight.mul_(6)
    model.model.embed_tokens.weight.normal_()
    tree_batch = make_tree_batch([tree] * 2, model.device)

    def drafts(model):
        drafter = ModelDrafter(model, 2, 64, tree.num_nodes)
        rows = BatchState.new(2, 5, torch.device(DEVICE))
        for row, length in enumerate((7, 12)):
            drafter.read(row, torch.arange(length, device=DEVICE))
            rows.set(row, GenerationConfig(temperature=0.5 * sampled, seed=row))
            rows.begin(row, length, 3)
        rows.asked = Asked(sampled=sampled)
        for block in ([1, 3, 0, 0, 0, 0], [3, 8, 9, 10, 0, 0]):
            rows.block[:] = torch.tensor(block, device=DEVICE)
            proposal = drafter.draft(rows, tree_batch, 5, 60, True)
            assert proposal.finite.all()
            yield proposal.tokens.clone(), proposal.logits
            rows.active[1] = False
        assert drafter.cache.length.tolist() == [7 + 1 + 3, 12 + 1]

    wanted = list(drafts(model.double()))
    fused["on"] = True
    for (tokens, logits), exact in zip(drafts(model.bfloat16()), wanted, strict=True):
        assert torch.equal(tokens, exact[0])
        assert relative_error(logits, exact[1]) < 0.05
