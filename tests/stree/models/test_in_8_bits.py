"""Targets in 8 bits: the model of their numbers written out is the oracle, at every product."""

import copy

import pytest
import torch
from families import LAYOUTS, OF_EACH_KIND, VOCAB, random_reference
from lanes import costly

from stree import TokenTree
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import UsageError
from stree.models.layers.packed_linear import ScaledLinear
from stree.models.model import HybridModel
from stree.models.slicing import slice_drafter

FLOAT8 = torch.float8_e4m3fn


def written_out(model: HybridModel) -> HybridModel:
    """Return a model with the numbers of one in 8 bits, and of its head."""
    plain = HybridModel(model.config)
    plain.load_state_dict(model.plain_state(), assign=True)
    if model.head_in_8_bits is not None:  # of a tied head, which the embedding is not
        plain.head_in_8_bits = copy.deepcopy(model.head_in_8_bits)
    return plain.eval()


def put_back_every_third(model: HybridModel) -> None:
    """Hold some projections as numbers, as published checkpoints do, others with several scales."""
    for index, (name, each) in enumerate(model.projections().items()):
        if index % 3 == 2:
            own = torch.nn.Linear(each.in_features, each.out_features, bias=False)
            own.weight.data, own.bias = model.plain_state()[f"{name}.weight"], each.bias
            model.set_submodule(name, own)
        elif index % 3 == 1 and each.in_features % 4 == 0:
            each.scale.data = each.scale.repeat(1, 4) * torch.tensor([1.0, 0.5, 2.0, 1.5])


@pytest.mark.parametrize("partly", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(
    "layout", [*OF_EACH_KIND, *map(costly, sorted(LAYOUTS.keys() - {*OF_EACH_KIND}))]
)
@torch.no_grad()
def test_products_in_8_bits_are_those_of_the_numbers(layout, partly, tmp_path):
    random_reference(layout, 1).save_pretrained(tmp_path)
    model, before = load_model(tmp_path, in_8_bits=True), load_model(tmp_path)
    if partly:
        put_back_every_third(model)
    names = {name for name, each in model.named_modules() if isinstance(each, ScaledLinear)}
    assert partly or (names == model.projections().keys() and len(names) > model.config.num_layers)
    for name, each in model.named_modules():
        assert (name in names) == (getattr(each, "weight", torch.zeros(0)).dtype == FLOAT8), name
    plain, tokens = written_out(model), torch.randint(VOCAB, (2, 12))
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(tokens), before(tokens), atol=1e-3)
    tree = TokenTree((-1, 0, 0, 1, 3, 2))
    logits = []
    for each in (model, plain):
        cache = each.new_cache(32, tree.num_nodes, 2)
        each.prefill(tokens[:, :5], cache)
        logits.append(each.tree_forward(tokens[:, 5:11], tree, cache, cache.num_slots))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_a_model_in_8_bits_is_asked_for(tmp_path):
    """Its drafter has its numbers; packed twice it stays where it is; it is not saved."""
    random_reference("falcon", 1).save_pretrained(tmp_path / "checkpoint")
    model = load_model(tmp_path / "checkpoint")
    model.put_in_8_bits()
    cut = slice_drafter(model, [1])
    wanted = model.plain_state()["model.layers.1.mamba.in_proj.weight"]
    assert torch.equal(cut.model.layers[0].mamba.in_proj.weight, wanted)
    model.pack()
    places = model.state()[0]
    model.pack()
    assert model.state()[0] == places
    with pytest.raises(UsageError, match="in 8 bits, which no layout here writes"):
        save_model(model, tmp_path / "saved")


@torch.no_grad()
def test_a_cast_leaves_the_numbers_in_8_bits(tmp_path):
    random_reference("falcon", 1).save_pretrained(tmp_path)
    model, tokens = load_model(tmp_path, in_8_bits=True), torch.randint(VOCAB, (2, 12))
    wanted = written_out(model).double()(tokens)
    cast = model.double()
    assert cast.dtype == torch.float64
    assert all(each.weight.dtype == FLOAT8 for each in cast.projections().values())
    torch.testing.assert_close(cast(tokens), wanted, rtol=1e-4, atol=1e-4)
