"""Targets in 8 bits: the model of their numbers written out is the oracle, at every product."""

import copy
import re

import pytest
import torch
from families import LAYOUTS, OF_EACH_KIND, VOCAB, random_reference
from lanes import costly

from stree import TokenTree
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import UsageError
from stree.models.in_8_bits import plain_state, put_in_8_bits, scale_name, weights_for_8_bits
from stree.models.layers.mlp import Experts
from stree.models.model import HybridModel
from stree.models.packing import weights_state
from stree.models.slicing import slice_drafter

FLOAT8 = torch.float8_e4m3fn


def written_out(model: HybridModel) -> HybridModel:
    """Return a model with the numbers of one in 8 bits, and of its head."""
    plain = HybridModel(model.config)
    plain.load_state_dict(plain_state(model), assign=True)
    if model.head_in_8_bits is not None:  # of a tied head, which the embedding is not
        plain.head_in_8_bits = copy.deepcopy(model.head_in_8_bits)
    return plain.eval()


def put_back_every_third(model: HybridModel) -> None:
    """Hold some weights as numbers, as published checkpoints do, others with several scales."""
    for index, (name, weight) in enumerate(weights_for_8_bits(model).items()):
        place, _, own = name.rpartition(".")
        module, numbers = model.get_submodule(place), plain_state(model)[name]
        if index % 3 == 1 and weight.shape[-1] % 4 == 0:
            scale = model.get_parameter(scale_name(name))
            scale.data = scale.repeat_interleave(4, -1) * torch.tensor([1.0, 0.5, 2.0, 1.5])
        elif index % 3 == 2 and isinstance(module, Experts):
            setattr(module, own, torch.nn.Parameter(numbers))
            setattr(module, f"{own}_scale", None)
        elif index % 3 == 2:
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight.data, linear.bias = numbers, module.bias
            model.set_submodule(place, linear)


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
    names = {name for name, each in model.named_parameters() if each.dtype == FLOAT8}
    taken = weights_for_8_bits(model).keys()
    assert names < taken if partly else names == taken
    assert {name for name in taken if name.endswith((".up", ".down"))} == {
        name for name in model.state_dict() if re.fullmatch(r".*\.experts\.(up|down)", name)
    }
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
    put_in_8_bits(model)
    cut = slice_drafter(model, [1])
    wanted = plain_state(model)["model.layers.1.mamba.in_proj.weight"]
    assert torch.equal(cut.model.layers[0].mamba.in_proj.weight, wanted)
    model.pack()
    places = weights_state(model)[0]
    model.pack()
    assert weights_state(model)[0] == places
    with pytest.raises(UsageError, match="in 8 bits, which no layout here writes"):
        save_model(model, tmp_path / "saved")


@pytest.mark.parametrize("layout", ["falcon", "lfm2_moe"])
@torch.no_grad()
def test_a_cast_leaves_the_numbers_in_8_bits(layout, tmp_path):
    random_reference(layout, 1).save_pretrained(tmp_path)
    model, tokens = load_model(tmp_path, in_8_bits=True), torch.randint(VOCAB, (2, 12))
    wanted = written_out(model).double()(tokens)
    cast = model.double()
    assert cast.dtype == torch.float64
    assert all(each.dtype == FLOAT8 for each in weights_for_8_bits(cast).values())
    torch.testing.assert_close(cast(tokens), wanted, rtol=1e-4, atol=1e-4)
