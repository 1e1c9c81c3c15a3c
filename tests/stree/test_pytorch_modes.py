"""Decoding inside PyTorch's modes, after copies, and over modules that were replaced."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hf_models import decoder_of, prompts
from toys import right_now_and_then, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

import stree
from stree import BatchDecoder, Decoder
from stree.checkpoints.load_save import load_model
from stree.common.errors import UsageError

MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "plain": nullcontext,
}
PROMPT = "What is 3"
OPTIONS = dict(max_new_tokens=8, do_sample=False)
DOOR = dict(
    OPTIONS, custom_generate=stree.CUSTOM_GENERATE, drafter="ngram:2", trust_remote_code=True
)


def load(workspace, drafter, **options):
    tree = drafter and "chain-2"
    return stree.load(
        workspace / "target", drafter, device="cpu", tree=tree, max_length=64, **options
    )


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:the drafter .* does not record")
@pytest.mark.parametrize(
    ("made_in", "inside"),
    [("inference", "plain"), ("plain", "inference"), ("autocast", "autocast"),
     ("inference", "autocast"), ("no_grad", "inference")],
)
def test_a_decoder_gives_the_same_whatever_the_mode(workspace, drafter, made_in, inside):
    wanted = load(workspace, None).complete(PROMPT, max_new_tokens=8).tokens
    with MODES[made_in]():
        decoder = load(workspace, drafter)
        batch = load(workspace, drafter, num_rows=2, num_prefixes=2)
    for mode in (inside, made_in, "plain"):
        with MODES[mode]():
            assert decoder.complete(PROMPT, max_new_tokens=8).tokens == wanted
            assert batch.complete([PROMPT] * 3, max_new_tokens=8)[2].tokens == wanted


def test_what_is_loaded_in_inference_mode_can_be_trained(workspace):
    with torch.inference_mode():
        model = load_model(workspace / "target")
    model.requires_grad_()(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def llama():
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("inside", MODES)
def test_a_model_of_transformers_is_decoded_in_any_mode(inside):
    ids, _ = prompts((5,))
    with MODES[inside]():
        theirs = llama()
        decoder = decoder_of(theirs)
        wanted = theirs.to(torch.float32).generate(ids, **OPTIONS)
        if inside != "autocast":  # which transformers follows, and our decoders don't
            assert torch.equal(decoder.generate(ids, **OPTIONS), wanted)
        decoder.generate(ids, **OPTIONS)
    wanted = theirs.generate(ids, **OPTIONS)
    assert torch.equal(decoder.generate(ids, **OPTIONS), wanted)
    assert torch.equal(theirs.generate(ids, **OPTIONS), wanted)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_model_that_was_decoded_once_is_copied_without_its_decoder(again):
    theirs, (ids, _) = llama(), prompts((5,))
    wanted = theirs.generate(ids, **DOOR)
    decoder = theirs._stree_decoder
    other = again(theirs)
    assert torch.equal(other.generate(ids, **DOOR), wanted)
    if again is not copy.copy:
        assert other._stree_decoder.decoder.model is other
        assert theirs._stree_decoder is decoder
        with torch.no_grad():
            other.lm_head.weight.neg_()
        assert torch.equal(other.generate(ids, **DOOR), other.generate(ids, **OPTIONS))
        assert torch.equal(theirs.generate(ids, **DOOR), wanted)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_decoders_are_copied_or_say_in_a_sentence_why_not(again):
    ids, _ = prompts((5,))
    decoder = decoder_of(llama())
    wanted = decoder.generate(ids, **OPTIONS)
    assert torch.equal(again(decoder).generate(ids, **OPTIONS), wanted)
    target = tiny_model(1)
    for ours in (Decoder(target, max_length=32), BatchDecoder(target, max_length=32)):
        with pytest.raises(UsageError, match=r"no copy or pickle is made: copy or save its target"):
            again(ours)
    copied = Decoder(again(target), max_length=32)
    wanted = Decoder(target, max_length=32).generate([5, 3], max_new_tokens=4).tokens
    assert copied.generate([5, 3], max_new_tokens=4).tokens == wanted


def projections(layer):
    """Put other projections of the same shapes into a layer."""
    for part in (layer.self_attn, layer.mlp):
        for name, old in list(part.named_children()):
            if isinstance(old, torch.nn.Linear):
                new = torch.nn.Linear(old.in_features, old.out_features, old.bias is not None)
                setattr(part, name, new.to(old.weight.dtype).requires_grad_(False))


def last_layer(target):
    target.model.layers[1] = tiny_model(5, num_layers=2, attn_layers=(0, 1)).model.layers[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "replace", [lambda it: projections(it.model.layers[0]), last_layer], ids=["few", "layer"]
)
@pytest.mark.parametrize("captured", [True, False])
def test_modules_that_are_replaced_are_read(replace, captured, request):
    if captured:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1, num_layers=2, attn_layers=(0, 1))
    decoder = BatchDecoder(
        target, right_now_and_then(target), num_rows=1, max_length=64, num_prefixes=2
    )
    before = decoder.generate([[5, 3, 9]], max_new_tokens=12)[0].tokens
    replace(target)
    for _ in range(2):  # then the new modules' weights are changed in place
        fresh = BatchDecoder(copy.deepcopy(target), num_rows=1, max_length=64)
        fresh.target.pack()
        wanted = fresh.generate([[5, 3, 9]], max_new_tokens=12)[0].tokens
        assert decoder.generate([[5, 3, 9]], max_new_tokens=12)[0].tokens == wanted != before
        before = wanted
        with torch.no_grad():
            for each in target.model.layers[1].parameters():
                each.neg_()
