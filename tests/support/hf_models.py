"""Make small models of transformers, prompts for them and their decoders."""

import torch
from families import VOCAB, random_reference

import stree
from stree.checkpoints.shared_weights import shared_model
from stree.models.slicing import slice_drafter
from stree.trees.token_tree import balanced

# What transformers' own cached steps do otherwise than its full forwards, and padding (through
# biases): tokens are compared without
SAME_WITH_A_CACHE = {"time_step_limit": (0.0, float("inf")), "time_step_min": 0.0}
TREE = balanced([3, 2, 1], "small")


def reference(family, seed=0, without_biases=False):
    """A tiny model that gives the same with and without its cache."""
    theirs = random_reference(family, seed)
    for name, value in SAME_WITH_A_CACHE.items():
        for each in (theirs.config, *theirs.modules()):
            if hasattr(each, name):
                setattr(each, name, value)
    if without_biases:
        with torch.no_grad():
            for name, tensor in theirs.named_parameters():
                if name.endswith("bias") and not name.endswith(("dt_bias", "correction_bias")):
                    tensor.zero_()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs


def decoder_of(theirs, **options):
    """With a drafter cut from the target, so that some drafts are accepted."""
    target = shared_model(theirs)
    layers = [0, target.config.num_layers - 1]
    return stree.from_transformers(theirs, slice_drafter(target, layers), TREE, **options)


def prompts(lengths=(9, 4, 6)):
    """Prompts of several lengths, padded at the left, and their mask."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (len(lengths), max(lengths)), generator=draw)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask


def assert_same(theirs, decoder, ids, *positional, **options):
    wanted = theirs.generate(ids, *positional, **options)
    got = decoder.generate(ids, *positional, **options)
    assert torch.equal(got, wanted), (got, wanted)
    return got
