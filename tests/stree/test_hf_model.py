"""The door from transformers: its models' tensors, its `generate`, the same tokens."""

import pytest
import torch
from families import FAMILIES, TRANSFORMERS, VOCAB, random_reference
from hf_models import assert_same, decoder_of, prompts, reference
from lanes import quick_first
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from toys import Streamer
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

import stree
from stree.checkpoints.load_save import load_model
from stree.checkpoints.shared_weights import shared_model
from stree.common.errors import CheckpointRefused, UsageError
from stree.hf_model import generate
from stree.logits.hf_processors import CalledForRow, settings_of
from stree.settings import THEIRS
from stree_kernels import ops


@pytest.fixture(scope="module")
def granite():
    return reference("granite", 1)


QUICK = ("granite", "zamba", "qwen3_5", "lfm2", "olmo_hybrid", "gpt_neox")


@pytest.mark.parametrize(
    ("family", "seed"),
    quick_first(
        [(family, 0) for family in QUICK],
        [(family, seed) for family in (*FAMILIES, *TRANSFORMERS) for seed in range(1, 6)],
        [(family, 0) for family in (*FAMILIES, *TRANSFORMERS) if family not in QUICK],
    ),
)
def test_greedy_tokens_are_those_of_generate(family, seed):
    theirs = reference(family, seed)
    decoder = decoder_of(theirs)
    ids, mask = prompts((9, 4, 6) if seed else (9, 4))
    num_new = 40 if seed else 8
    got = decoder.generate(ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False)
    assert torch.equal(got[:, : ids.shape[1]], ids)
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        alone = theirs.generate(
            ids[row : row + 1, padding:], max_new_tokens=num_new, do_sample=False
        )
        assert torch.equal(got[row, padding:], alone[0])
    assert sum(sum(each.stats.accepted_per_call) for each in decoder.outputs) > 0


def families(*quick, in_test_all=()):
    """Return a parameter for each family; only the named ones are not long."""
    return quick_first(
        [(each,) for each in quick], [(each,) for each in FAMILIES],
        [(each,) for each in in_test_all],
    )


@pytest.mark.parametrize(("family",), families("granite", "qwen3_5"))
def test_padded_batches_are_those_of_generate(family):
    theirs = reference(family, 1, without_biases=True)
    ids, mask = prompts()
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(decoder_of(theirs).generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_layouts_of_transformers_beside_the_families(kind):
    torch.manual_seed(0)
    common = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2)
    if kind == "llama":
        theirs = LlamaForCausalLM(
            LlamaConfig(**common, num_attention_heads=2, intermediate_size=24)
        )
    else:
        theirs = Mamba2ForCausalLM(
            Mamba2Config(**common, num_heads=4, head_dim=8, state_size=8, n_groups=1)
        )
    ids, _ = prompts((5,))
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    decoder = decoder_of(theirs.eval())
    assert torch.equal(decoder.generate(ids, **options), theirs.generate(ids, **options))
    shared = {tensor.data_ptr() for tensor in theirs.state_dict().values()}
    assert all(tensor.data_ptr() in shared for tensor in decoder.target.state_dict().values())


def test_no_prompts_have_no_answers_and_an_empty_one_is_refused():
    decoder = decoder_of(random_reference("granite", 1))
    assert decoder.generate(torch.ones(0, 3, dtype=torch.long), max_new_tokens=4).shape == (0, 3)
    with pytest.raises(UsageError, match="the prompt is empty"):
        decoder.generate(torch.ones(1, 0, dtype=torch.long), max_new_tokens=4)


# Memory


OWN_TENSORS = {
    "bamba": ("q_proj", "k_proj"), "granite": ("embed_tokens", "model.norm"), "nemotron": (),
    "lfm2": (), "lfm2_moe": ("correction_bias",), "zamba": (),
    "qwen3_next": ("norm", "q_proj", "k_proj", "gate_proj", "in_proj_"),
    "qwen3_5": ("norm", "q_proj", "k_proj", "self_attn.gate_proj"),
    "olmo_hybrid": ("in_proj_qkv",),
}


def storages(*models):
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


@pytest.mark.parametrize("family", OWN_TENSORS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tensors_are_shared(family, seed):
    theirs = random_reference(family, seed)
    ours, before = shared_model(theirs), storages(theirs)
    own = [
        name for name, tensor in ours.state_dict().items()
        if tensor.untyped_storage().data_ptr() not in before
    ]
    assert not [name for name in own if not any(each in name for each in OWN_TENSORS[family])]
    assert len(storages(theirs, ours)) == len(before) + len(own)


@pytest.mark.parametrize(("family",), families("granite", "zamba", "qwen3_next"))
@torch.no_grad()
def test_packing_for_the_fused_kernels_makes_no_second_copy(family, monkeypatch):
    """The joined weights are also transformers' own, which goes on as before."""
    theirs = random_reference(family, 1)
    ids, _ = prompts((7,))
    wanted = theirs(ids, use_cache=False).logits
    ours = shared_model(theirs)
    before = sum(storages(theirs, ours).values())
    monkeypatch.setattr(ops, "fused", lambda *_: True)
    ours.pack()
    assert sum(storages(theirs, ours).values()) == before
    monkeypatch.undo()
    torch.testing.assert_close(theirs(ids, use_cache=False).logits, wanted)
    torch.testing.assert_close(ours(ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family",), families("granite", "zamba", "qwen3_next"))
@torch.no_grad()
def test_transformers_saves_a_model_that_has_decoded_here(family, tmp_path):
    theirs, (ids, _) = random_reference(family, 1), prompts((7,))
    wanted = theirs(ids, use_cache=False).logits
    stree.from_transformers(theirs).generate(ids, max_new_tokens=2)
    theirs.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again(ids, use_cache=False).logits, wanted)
    torch.testing.assert_close(load_model(tmp_path)(ids), wanted, rtol=1e-4, atol=1e-4)


def test_a_weight_that_changes_in_place_changes_in_both(granite):
    ours = shared_model(granite)
    weight = granite.model.layers[0].input_layernorm.weight
    assert ours.model.layers[0].input_layernorm.weight is weight


@pytest.mark.parametrize(("family",), families("granite", "falcon"))
def test_a_decoder_follows_a_model_that_is_trained_or_moved(family):
    """Tensors of our own are made anew; without a change nothing is."""
    theirs, (ids, _) = reference(family, 1), prompts((7,))
    decoder, options = stree.from_transformers(theirs), dict(max_new_tokens=12, do_sample=False)
    before = assert_same(theirs, decoder, ids, **options)
    kept = decoder.target, decoder._batch
    assert_same(theirs, decoder, ids, **options)
    generate(theirs, inputs=ids, **options)
    own = theirs._stree_decoder.decoder
    assert (decoder.target, decoder._batch) == kept
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    assert not torch.equal(assert_same(theirs, decoder, ids, **options), before)
    assert torch.equal(generate(theirs, inputs=ids, **options), theirs.generate(ids, **options))
    assert theirs._stree_decoder.decoder is own
    theirs.set_experts_implementation("eager")  # the grouped products of transformers know no fp64
    theirs.to(torch.float64)
    assert_same(theirs, decoder, ids, **options)
    assert decoder.target.dtype == torch.float64


def test_hooks_are_refused_and_those_of_transformers_are_not(granite):
    decoder, (ids, _) = decoder_of(granite), prompts((7,))
    granite(ids, output_hidden_states=True)
    assert any(each._forward_hooks for each in granite.modules()), "some of its own"
    decoder.generate(ids, max_new_tokens=2)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        hook = getattr(granite.model.layers[1], register)(lambda *_: None)
        with pytest.raises(UsageError, match=r"model\.layers\.1 has a forward hook"):
            decoder.generate(ids, max_new_tokens=2)
        hook.remove()
    decoder.generate(ids, max_new_tokens=2)


# What generate takes


class AfterToken(StoppingCriteria):
    """Criterion that ends a sequence, or each of a batch, after one of some tokens."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **_):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_ends_and_paddings_are_those_of_generate(granite):
    decoder = decoder_of(granite)
    ids, mask = prompts()
    free = granite.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    eos = [int(free[0, -12]), int(free[1, -7])]
    got = assert_same(
        granite, decoder, ids, attention_mask=mask, max_new_tokens=20, do_sample=False,
        eos_token_id=eos, pad_token_id=3,
    )
    assert (got == 3).any() and got.shape[1] <= free.shape[1]
    config = GenerationConfig(max_length=14, eos_token_id=eos[0], pad_token_id=None)
    assert_same(granite, decoder, ids, config, attention_mask=mask)
    assert_same(granite, decoder, ids, max_new_tokens=3, num_return_sequences=1)


@pytest.mark.parametrize("eos", [None, 60])
def test_stopping_criteria_end_each_sequence(granite, eos):
    """With an EOS sequences are padded when they end, without one they go on together."""
    decoder = decoder_of(granite)
    ids, mask = prompts()
    free = granite.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    stops = AfterToken([int(free[0, -10]), int(free[1, -14]), int(free[2, -12])])
    got = assert_same(
        granite, decoder, ids, attention_mask=mask, max_new_tokens=20, do_sample=False,
        eos_token_id=eos, stopping_criteria=StoppingCriteriaList([stops]),
    )
    assert got.shape[1] < free.shape[1]


def test_a_streamer_gets_what_generate_would_put(granite):
    decoder, (ids, _) = decoder_of(granite), prompts((6,))
    one, other = Streamer(), Streamer()
    got = decoder.generate(ids, max_new_tokens=9, do_sample=False, streamer=one)
    granite.generate(ids, max_new_tokens=9, do_sample=False, streamer=other)
    assert one.tokens == other.tokens == got[0].tolist()
    assert one.ended == other.ended == 1
    failing = Streamer()
    with pytest.raises(UsageError):
        decoder.generate(ids, num_beams=2, streamer=failing)
    assert failing.ended == 1


def test_sampling_repeats_with_torchs_seed_and_keeps_the_filters(granite):
    decoder, (ids, mask) = decoder_of(granite), prompts()
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=True)

    def drawn(seed, **more):
        torch.manual_seed(seed)
        return decoder.generate(ids, **options, **more)

    assert torch.equal(drawn(1, temperature=9.0), drawn(1, temperature=9.0))
    assert not torch.equal(drawn(1, temperature=9.0), drawn(2, temperature=9.0))
    several = drawn(1, num_return_sequences=2, temperature=9.0)
    assert len(several) == 6 and not torch.equal(several[0], several[1])
    reused = [each.stats.num_reused_tokens for each in decoder.outputs]
    assert reused[::2] == [0] * 3 and reused[1::2] == mask.sum(1).tolist()  # read once
    alone = stree.Decoder(decoder.target, max_length=64)
    for row, each in enumerate(decoder.outputs):
        prompt = ids[row // 2][mask[row // 2] != 0]
        asked = stree.GenerationConfig(12, 9.0, 50, seed=each.seed)
        assert alone.generate(prompt, asked).tokens == each.tokens
    greedy = granite.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(drawn(1, top_k=1), greedy)
    assert torch.equal(drawn(1, top_p=1e-6, top_k=0), greedy)
    assert torch.equal(drawn(1, min_p=1.0, top_k=0), greedy)
    penalised = drawn(1, min_p=1.0, top_k=0, repetition_penalty=1.9)
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        alone = granite.generate(
            ids[row : row + 1, padding:], max_new_tokens=12, do_sample=False, repetition_penalty=1.9
        )
        assert torch.equal(penalised[row, padding:], alone[0])
    assert not torch.equal(penalised, greedy)


@pytest.mark.filterwarnings("error:temperature is 0")
@pytest.mark.parametrize(("family",), families("granite", in_test_all=["qwen3_5"]))
def test_greedy_tokens_with_a_repetition_penalty_are_those_of_generate(family):
    theirs = reference(family, 1)
    decoder, (ids, _) = decoder_of(theirs), prompts((9,))
    options = dict(max_new_tokens=30, do_sample=False)
    plain = theirs.generate(ids, **options)
    # One token over and over is what a penalty below 1 asks for, and withstands a weak one
    withstands = (1.3, 0.6) if len(set(plain[0, ids.shape[1] :].tolist())) == 1 else ()
    for penalty in (1.3, 4.0, 0.6):
        got = decoder.generate(ids, **options, repetition_penalty=penalty)
        assert torch.equal(got, theirs.generate(ids, **options, repetition_penalty=penalty))
        assert penalty in withstands or not torch.equal(got, plain)
        assert sum(decoder.outputs[0].stats.accepted_per_call) > 0


def test_bad_words_and_least_lengths_are_those_of_generate(granite):
    decoder, (ids, mask) = decoder_of(granite), prompts((9, 4))
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    new = granite.generate(ids, **options)[:, ids.shape[1] :].tolist()
    words = [new[0][:2], new[1][3:4], [*new[0][3:5], new[0][5]]]
    for rules in (
        dict(bad_words_ids=words), dict(bad_words_ids=words, eos_token_id=new[1][3]),
        dict(eos_token_id=[new[0][1], new[1][2]], min_new_tokens=5),
        dict(eos_token_id=[new[0][1], new[1][2]], min_length=ids.shape[1] + 4),
    ):
        got = assert_same(granite, decoder, ids, **options, **rules)
        assert got.tolist() != granite.generate(ids, **{**options, **rules, "bad_words_ids": None,
                                                        "min_new_tokens": None, "min_length": None})


def odd_after_even(ids, scores):
    """Leave out tokens of the last token's parity, as a user's own processor might."""
    left_out = torch.arange(VOCAB)[None] % 2 == ids[:, -1:] % 2
    return scores.masked_fill(left_out, -torch.inf)


def allowed_for(row, ids):
    return range(row, VOCAB, 3) if len(ids) < 15 else range(row, VOCAB, 2)


PENALTY = RepetitionPenaltyLogitsProcessor(4.0)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "rules",
    [
        dict(no_repeat_ngram_size=1),
        dict(sequence_bias={(4,): 9.0, (4, 7): 20.0}),
        dict(prefix_allowed_tokens_fn=allowed_for),
        dict(forced_eos_token_id=7),
        dict(logits_processor=[odd_after_even], repetition_penalty=4.0),
        dict(logits_processor=[odd_after_even, PENALTY]),
        dict(logits_processor=[RepetitionPenaltyLogitsProcessor(4.0, 4)]),
        dict(logits_processor=[odd_after_even], eos_token_id=[30, 41], min_new_tokens=5),
    ],
    ids="-".join,
)
def test_logits_processors_are_called_as_generate_calls_them(granite, rules):
    decoder, (ids, mask) = decoder_of(granite), prompts((9, 4))
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    if "logits_processor" in rules:
        rules = {**rules, "logits_processor": LogitsProcessorList(rules["logits_processor"])}
    got = assert_same(granite, decoder, ids, **options, **rules)
    assert not torch.equal(got, granite.generate(ids, **options))


@pytest.mark.parametrize("own", [(), (odd_after_even, PENALTY)], ids=["", "own"])
@pytest.mark.parametrize(
    "cuts", [dict(typical_p=0.7), dict(epsilon_cutoff=0.02, min_p=0.01), dict(eta_cutoff=0.1), {}],
    ids=str,
)
def test_scores_of_sampled_answers_are_transformers(granite, cuts, own):
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=20, top_p=0.9,
                              repetition_penalty=1.3, min_new_tokens=12, **cuts)
    config._eos_token_tensor = torch.tensor([7])
    theirs = granite._get_logits_processor(
        config, input_ids_seq_length=9, logits_processor=LogitsProcessorList(own), device="cpu"
    )
    (ids, mask), scores = prompts((9, 4)), torch.randn(2, VOCAB)
    wanted = theirs(ids, scores.clone())
    settings, called = settings_of(theirs, True, (7,), 9, mask)
    assert (settings["repetition_penalty"], settings["min_new_tokens"]) == (4.0 if own else 1.3, 12)
    made_of = {each: each for each in called}
    for first in theirs[:2]:  # what the two settings stand for
        scores = first(ids, scores)
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        by_row = CalledForRow(called, row, ids[row : row + 1, :padding])
        scores[row] = by_row(ids[row : row + 1, padding:], scores[row : row + 1].clone())[0]
    for each in theirs[2:]:
        scores = scores if each in made_of else each(ids, scores)
    assert torch.equal(scores, wanted)
    cut_by_function = len(cuts) - ("min_p" in cuts)
    assert ("temperature" in settings and settings["temperature"] == 1.0) == bool(cut_by_function)


def letters():
    """Return a tokenizer of one letter a token."""
    vocabulary = {chr(65 + token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings(granite):
    decoder, (ids, _) = decoder_of(granite), prompts((6,))
    free = granite.generate(ids, max_new_tokens=12, do_sample=False)
    stop = "".join(chr(65 + int(token)) for token in free[0, -8:-6])
    options = dict(max_new_tokens=12, do_sample=False, tokenizer=letters())
    got = assert_same(granite, decoder, ids, **options, stop_strings=[stop])
    assert got.shape[1] < free.shape[1]
    config = GenerationConfig(stop_strings=[stop], pad_token_id=0)
    assert torch.equal(decoder.generate(ids, config, **options), got)
    assert config.stop_strings == [stop]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(num_beams=2), f"num_beams = 2: {THEIRS}"),
        (dict(return_dict_in_generate=True), "generate = True: the ids are returned"),
        (dict(guidance_scale=2.0), f"UnbatchedClassifierFreeGuidanceLogitsProcessor: {THEIRS}"),
        (dict(assistant_model="small"), "assistant_model = 'small': the drafter of stree.from_"),
        (dict(max_new_token=4), r"did you mean max_new_tokens\?"),
        (dict(assistant_model=torch.nn.ModuleList([torch.nn.ReLU()])), "model = ModuleList"),
        (dict(inputs_embeds=torch.zeros(2, 2, 4)), "inputs_embeds"),
        (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens = 3"),
        (dict(seed=1), "seed = 1: torch.manual_seed repeats"),
        (dict(presence_penalty=0.5), "presence_penalty = 0.5: the decoder of stree.load takes it"),
        (dict(logprobs=2, ignore_eos=True), "ignore_eos = True: the decoder of stree.load takes"),
        (dict(attention_mask=torch.tensor([[1, 1, 1, 0]])), "pads at the right"),
        (dict(stop_strings=["a"]), "need the tokenizer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(granite, options, named):
    decoder = stree.from_transformers(granite)
    with pytest.raises(UsageError, match=named) as refusal:
        decoder.generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=4, **options)
    assert "\n" not in str(refusal.value)
    assert decoder.generate(torch.tensor([[1, 2]]), max_new_tokens=4).shape == (1, 6)


def test_prompts_that_are_no_tensor_are_one_line(granite):
    decoder, batch = stree.from_transformers(granite), {"input_ids": prompts((6,))[0]}
    for wrong, told in (("a text", "are a str"), ([1, 2], "are a list"), (batch, r"\*\*batch")):
        for given in (dict(inputs=wrong), dict(input_ids=wrong)):
            with pytest.raises(UsageError, match=told):
                decoder.generate(**given)


def test_models_that_cannot_be_shared_are_refused_by_name(granite):
    with pytest.raises(UsageError, match="is a str, wanted one that transformers has loaded"):
        stree.from_transformers("granite")
    other = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(CheckpointRefused, match=r"'gpt2' model, wanted one of: .*Bamba"):
        stree.from_transformers(other)
    adapted = reference("bamba")
    layer = next(each for each in adapted.model.layers if hasattr(each, "feed_forward"))
    layer.feed_forward.up_proj = torch.nn.Sequential(layer.feed_forward.up_proj)
    with pytest.raises(CheckpointRefused, match=r"up_proj\.weight, .* missing, .*; merge"):
        stree.from_transformers(adapted)
    sizes = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_attention_heads=2)
    untied = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True))
    untied.lm_head.weight = torch.nn.Parameter(torch.ones(VOCAB, 16))
    with pytest.raises(CheckpointRefused, match=r"ties lm_head\.weight to .*, but these are two t"):
        stree.from_transformers(untied)
    packed = torch.ao.quantization.quantize_dynamic(reference("bamba"), {torch.nn.Linear})
    with pytest.raises(CheckpointRefused, match="wanted a plain tensor: load it unquantised"):
        stree.from_transformers(packed)
    with pytest.raises(UsageError, match="the model lies on meta: load it"):
        stree.from_transformers(reference("bamba").to("meta"))
    with pytest.raises(UsageError, match="needs a drafter to fill it"):
        stree.from_transformers(granite, tree="paper")
    with pytest.raises(UsageError, match="a streamer shows one answer at a time"):
        stree.from_transformers(granite).generate(prompts()[0], streamer=Streamer())
