"""Prefixes that were read before are not read again, and change nothing of what comes out."""

import itertools

import pytest
import torch
from captures import nothing_waits
from lanes import costly, quick_first
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.prefillers import PrefillGraph
from stree.common.errors import UsageError
from stree.drafters.model import ModelDrafter
from stree.models.in_8_bits import put_in_8_bits

SYSTEM = [7, 3, 9, 1, 5, 5, 2]


def turns(decoder, count: int, generation: GenerationConfig, keep: bool):
    """Hold a conversation, of which each prompt is all that came before and two tokens more."""
    prompt, outputs = [*SYSTEM, 8], []
    for turn in range(count):
        row = decoder.admit(Request(prompt, generation))
        while not any(report.finish_reason for report in decoder.step()):
            pass
        outputs.append(decoder.release(row, keep=keep))
        prompt = [*prompt, *outputs[-1].tokens, 11 + turn, 4]
    return outputs


@pytest.mark.parametrize("attn_layers", [costly(()), (1,)], ids=str)
@pytest.mark.parametrize(
    ("temperature", "graphs", "in_8_bits"),
    quick_first(
        [(0.0, False, False), (1.0, True, False)],
        [(0.0, True, False), (1.0, False, False), (0.0, False, True)],
    ),
)
def test_a_conversation_reads_each_turn_once(
    temperature, graphs, in_8_bits, attn_layers, request, monkeypatch
):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1, attn_layers=attn_layers)
    drafter = right_now_and_then(target)
    if in_8_bits:
        put_in_8_bits(target)
    generation = GenerationConfig(13, temperature=temperature, seed=2)

    def answers(num_prefixes):
        decoder = BatchDecoder(
            target, drafter, TokenTree.paper(),
            num_rows=2, max_length=128, num_prefixes=num_prefixes,
        )
        return turns(decoder, 4, generation, keep=True)

    wanted = answers(0)
    read, replay, again = ModelDrafter.read, PrefillGraph.replay_drafter, []

    def counted(self, row, tokens, *others):
        again.append(len(tokens))
        read(self, row, tokens, *others)

    def counted_too(self, skipped):
        again.append(int(self.count) - skipped)
        replay(self, skipped)

    monkeypatch.setattr(ModelDrafter, "read", counted)
    monkeypatch.setattr(PrefillGraph, "replay_drafter", counted_too)
    got = answers(3)
    prompt_length, all_prompts = len(SYSTEM) + 1, 0
    reused = []
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.stats.accepted_per_call == theirs.stats.accepted_per_call  # the drafter's, too
        assert mine.stats.num_reused_tokens <= prompt_length and not theirs.stats.num_reused_tokens
        reused.append(mine.stats.num_reused_tokens)
        all_prompts += prompt_length
        prompt_length += 15
    assert reused[0] == 0 and max(reused) > 15
    if graphs and temperature == 0 and not attn_layers:
        # A step follows the one that ends a turn, and the drafter reads tokens that the turn drops
        assert sum(again) <= all_prompts
    else:  # the drafter reads no more than the target
        assert min(again) < 15 and len(again) == 4
        assert sum(again) <= all_prompts - sum(reused)
    if not graphs:  # no step ran ahead of the one that ended a turn
        assert all(after >= before + 8 for before, after in itertools.pairwise(reused))


@pytest.mark.costly
@pytest.mark.parametrize("temperature", quick_first([(1.0,)], [(0.0,)]))
def test_what_a_prefix_holds_is_penalised_though_it_is_not_read(temperature, captured_on_cpu):
    target = tiny_model(1)
    drafter = right_now_and_then(target)
    generation = GenerationConfig(13, temperature, repetition_penalty=1.7, seed=5)
    kept, read, plain, unpenalised = (
        turns(decoder, 3, setting, keep=True)
        for decoder, setting in (
            *((BatchDecoder(target, drafter, TokenTree.paper(), num_rows=2, max_length=128,
                            num_prefixes=count), generation) for count in (3, 0)),
            *((BatchDecoder(target, num_rows=1, max_length=128), each)
              for each in (generation, GenerationConfig(13, temperature, seed=5))),
        )
    )
    assert [out.tokens for out in kept] == [out.tokens for out in plain]
    assert [out.tokens for out in read] == [out.tokens for out in plain]
    assert [out.tokens for out in unpenalised] != [out.tokens for out in plain]
    assert kept[2].stats.num_reused_tokens > 15 and not read[2].stats.num_reused_tokens


def test_a_system_prompt_is_read_once_for_many_rows():
    target = tiny_model(1)
    drafter = right_now_and_then(target)
    decoder = BatchDecoder(target, drafter, num_rows=3, max_length=64, num_prefixes=1)
    row = decoder.admit(Request(SYSTEM, GenerationConfig(1)))
    decoder.step()
    decoder.release(row, keep=True)
    served = [Request([*SYSTEM, each], GenerationConfig(9)) for each in range(6)]
    outputs = decoder.generate(served)
    for layer in decoder.cache.layers:  # what is kept is its own
        for tensor in (vars(layer).get(name) for name in ("keys", "values", "state", "history")):
            if tensor is not None:
                tensor.fill_(torch.nan)
    outputs += decoder.generate(served)
    plain = Decoder(target, max_length=64)
    for each, out in zip(served * 2, outputs, strict=True):
        assert out.stats.num_reused_tokens == len(SYSTEM)
        assert out.tokens == plain.generate(each.prompt_ids, GenerationConfig(9)).tokens
    same = decoder.generate([Request(SYSTEM, GenerationConfig(9))])[0]  # nothing would be left
    assert same.stats.num_reused_tokens == 0
    assert same.tokens == plain.generate(SYSTEM, GenerationConfig(9)).tokens


def test_the_longest_fits_and_the_least_used_goes():
    decoder = BatchDecoder(tiny_model(1), num_rows=1, max_length=64, num_prefixes=2)

    def reused(prompt, keep):
        row = decoder.admit(Request(prompt, GenerationConfig(1)))
        decoder.step()
        return decoder.release(row, keep=keep).stats.num_reused_tokens

    assert reused([1, 2], keep=True) == 0
    assert reused([1, 2, 3, 4], keep=True) == 2
    assert reused([1, 2, 3, 4, 5], keep=False) == 4
    assert reused([1, 2, 9], keep=False) == 2
    assert reused([6, 6, 6], keep=True) == 0  # [1, 2, 3, 4] goes: [1, 2] was used after it
    decoder.num_reusable([1])  # waits for what was kept last
    assert len(decoder.scheduler.prefixes.kept) == 2
    assert reused([1, 2, 3, 4, 5], keep=False) == 2
    assert reused([6, 6, 6, 1], keep=False) == 3


@pytest.mark.costly
def test_what_a_stop_has_cut_off_is_not_kept(captured_on_cpu):
    """The row has gone on past the last token that counts: what it holds is not of this prefix."""
    target = tiny_model(1)
    decoder = BatchDecoder(target, target, TokenTree.chain(4), num_rows=1, max_length=64,
                           num_prefixes=2)
    for length in range(2, 12):
        row = decoder.admit(Request(SYSTEM, GenerationConfig(length)))
        while not any(report.finish_reason for report in decoder.step()):
            pass
        first = decoder.release(row, keep=True)
        prompt = [*SYSTEM, *first.tokens, 3]
        (second,) = decoder.generate([Request(prompt, GenerationConfig(6))])
        wanted = Decoder(target, max_length=64).generate(prompt, GenerationConfig(6))
        assert second.tokens == wanted.tokens


@pytest.mark.parametrize("keep_prompt", [False, True])
def test_no_more_is_held_than_asked_for(keep_prompt):
    """Copies count even if their lengths were never asked for."""
    decoder = BatchDecoder(tiny_model(1), num_rows=8, max_length=64, num_prefixes=3)
    rows = [
        decoder.admit(Request([*SYSTEM, last], GenerationConfig(1), keep_prompt=keep_prompt))
        for last in range(8)
    ]
    decoder.step()
    for row in rows:
        decoder.release(row, keep=True)
        assert len(decoder.worker._saved) <= 3
    assert [decoder.num_reusable([*SYSTEM, last, 9]) for last in range(8)] == [0] * 5 + [8] * 3
    assert len(decoder.worker._saved) == 3


@pytest.mark.parametrize("drafts", [False, True])
def test_prefixes_stay_within_their_bytes(drafts):
    target = tiny_model(1)
    drafter = tiny_model(2) if drafts else None
    tree = TokenTree.chain(2) if drafts else None
    decoder = BatchDecoder(target, drafter, tree, num_rows=1, max_length=64, num_prefixes=99)
    each, token = decoder.worker.prefix_bytes()
    budget = 3 * each + 40 * token
    assert decoder.limit_prefixes(budget) == budget // (each + 64 * token)

    def held() -> int:
        return sum(
            part.num_bytes for saved in decoder.worker._saved.values()
            for part in (saved.target, saved.drafter) if part is not None
        )

    def reused(prompt, keep=True) -> int:
        row = decoder.admit(Request(prompt, GenerationConfig(1), keep_prompt=keep))
        while not any(report.finish_reason for report in decoder.step()):
            pass
        return decoder.release(row).stats.num_reused_tokens

    longest = 0
    for length in (5, 10, 20, 15, 8, 30):
        assert reused([length, *range(length - 1)]) == 0
        longest = max(longest, held())
        assert held() <= budget
    assert longest > 2 * each  # several at once
    assert reused([30, *range(29), 1], keep=False) == 30
    assert reused([15, *range(14), 1], keep=False) == 0  # it went first
    decoder.limit_prefixes(each + 20 * token)
    assert reused([7, 7]) == 0
    assert held() <= each + 20 * token
    assert reused([9] * 40) == 0  # too long ever to be kept: what is there stays
    assert reused([7, 7, 7], keep=False) == 2
    row = decoder.admit(Request([5, 3, 2, 4], GenerationConfig(1), keep_prompt=True,
                                messages_end=2))
    sequence = decoder.scheduler.taken(row)
    assert decoder.scheduler.reads_to_prepare(sequence)[0] == [(0, 2), (2, 4)]
    decoder.limit_prefixes(0)  # nor is a prompt divided where nothing is kept
    assert decoder.scheduler.reads_to_prepare(sequence)[0] == [(0, 4)]


@pytest.mark.parametrize("drafts", [False, True])
def test_keeping_does_not_wait_for_the_device(drafts, captured_on_cpu):
    """The host learns a prefix's length when it is asked for."""
    target = tiny_model(1)
    drafter = right_now_and_then(target) if drafts else None
    decoder = BatchDecoder(target, drafter, num_rows=2, max_length=64, num_prefixes=2)
    rows = [decoder.admit(Request([*SYSTEM, each], GenerationConfig(9))) for each in (1, 2)]
    for _ in range(3):
        decoder.step()
    told = [[*SYSTEM, each + 1, *decoder.tokens_of(row)] for each, row in enumerate(rows)]
    with nothing_waits():
        for row in rows:
            decoder.release(row, keep=True)
    for row in rows:
        reused = decoder.num_reusable([*told[row], 5])
        assert len(SYSTEM) < reused <= len(told[row])
        wanted = Decoder(target, max_length=64).generate([*told[row], 5], GenerationConfig(9))
        (got,) = decoder.generate([Request([*told[row], 5], GenerationConfig(9))])
        assert got.tokens == wanted.tokens and got.stats.num_reused_tokens == reused
    with pytest.raises(AssertionError, match="_local_scalar_dense"), nothing_waits():
        decoder.cache.save(0)


def test_rows_beside_the_one_that_is_loaded_keep_what_they_have():
    target = tiny_model(1)
    cache, tokens = target.new_cache(64, 4, 3), torch.tensor([SYSTEM])
    for row in (0, 1, 2):
        target.prefill(tokens[:, : 3 + row], cache.at(row))
    saved = [cache.save(row) for row in (0, 1, 2)]
    assert [each.length for each in saved] == [3, 4, 5]
    cache.path_length[:] = 2
    cache.load(saved[2], 0)
    assert cache.path_length.tolist() == [0, 2, 2]
    for row, wanted in ((0, 2), (1, 1), (2, 2)):
        again = cache.save(row)
        assert again.length == saved[wanted].length
        for mine, theirs in zip(again.parts, saved[wanted].parts, strict=True):
            assert all(map(torch.equal, mine, theirs))


def _load_state_dict(target, other) -> None:
    target.load_state_dict(other.state_dict())


def _optimizer_step(target, other) -> None:
    optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
    for mine, theirs in zip(target.parameters(), other.parameters(), strict=True):
        mine.grad = mine.detach() - theirs.detach()
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "graphs"),
    [(_load_state_dict, True), (_optimizer_step, False), costly(_load_state_dict, False),
     costly(_optimizer_step, True)],
)
def test_prefixes_do_not_outlive_weights_that_are_changed_in_place(change, graphs, request):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target, other = tiny_model(1), tiny_model(2)
    generation = GenerationConfig(9)
    decoder = Decoder(target, right_now_and_then(target), max_length=128, num_prefixes=4)
    first = decoder.generate(SYSTEM, generation)
    turn = [*SYSTEM, *first.tokens, 4, 4]
    assert decoder.num_reusable(turn) > 0
    change(target, other)
    assert decoder.num_reusable(turn) == 0
    second = decoder.generate(turn, generation)
    assert second.stats.num_reused_tokens == 0
    assert second.tokens == Decoder(target, max_length=128).generate(turn, generation).tokens
    assert decoder.num_reusable([*turn, *second.tokens, 4]) > 0  # what is read since then is kept


def test_a_changed_drafter_reads_a_prefix_again():
    target = tiny_model(1)
    drafter = right_now_and_then(target)
    decoder = Decoder(target, drafter, max_length=128, num_prefixes=4)
    turn = [*SYSTEM, *decoder.generate(SYSTEM, GenerationConfig(9)).tokens, 4]
    with torch.no_grad():
        next(drafter.parameters()).mul_(1.5)
    assert decoder.num_reusable(turn) == 0


def test_nothing_is_kept_of_a_row_whose_weights_changed_while_it_was_under_way():
    target = tiny_model(1)
    decoder = BatchDecoder(target, num_rows=2, max_length=128, num_prefixes=4)
    row = decoder.admit(Request(SYSTEM, GenerationConfig(9), keep_prompt=True))
    decoder.step()
    with torch.no_grad():
        next(target.parameters()).mul_(1.5)
    other = decoder.admit(Request([8, 8], GenerationConfig(1)))
    while not any(report.row == row and report.finish_reason for report in decoder.step()):
        pass
    tokens = decoder.release(row, keep=True).tokens
    decoder.release(other)
    assert decoder.num_reusable([*SYSTEM, *tokens, 4]) == 0


def test_a_prompt_read_with_two_sets_of_weights_is_not_kept(monkeypatch):
    """Its first chunk was read before the weights changed, its second one after."""
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 4)
    target = tiny_model(1)
    decoder = BatchDecoder(target, num_rows=3, max_length=128, num_prefixes=4)
    decoder.admit(Request([6, 6], GenerationConfig(60, ignore_eos=True)))
    decoder.step()
    row = decoder.admit(Request(SYSTEM, GenerationConfig(9), keep_prompt=True))
    decoder.step()
    assert decoder.scheduler.sequences[row].is_prefilling
    with torch.no_grad():
        next(target.parameters()).mul_(1.5)
    decoder.admit(Request([8, 8], GenerationConfig(1)))
    while decoder.scheduler.sequences[row].is_prefilling:
        decoder.step()
    assert decoder.num_reusable([*SYSTEM, 4]) == 0


@pytest.mark.parametrize("graphs", [False, costly(True)])
@pytest.mark.parametrize("messages_end", [0, 1, 4, 7])
def test_a_part_of_a_prompt_is_kept_as_it_is_read(messages_end, graphs, request):
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    target = tiny_model(1)
    generation, goes_on = GenerationConfig(9, ignore_eos=True), [*SYSTEM[:messages_end], 13, 8]
    outputs = []
    for num_prefixes in (0, 2):
        decoder = BatchDecoder(
            target, target, TokenTree.chain(3), num_rows=2, max_length=64, num_prefixes=num_prefixes
        )
        first = Request(SYSTEM, generation, keep_prompt=True, messages_end=messages_end)
        outputs.append(decoder.generate([first]) + decoder.generate([Request(goes_on, generation)]))
    for read, kept in zip(*outputs, strict=True):
        assert kept.tokens == read.tokens
        assert kept.stats.accepted_per_call == read.stats.accepted_per_call == [3, 3]
    assert kept.stats.num_reused_tokens == messages_end and not read.stats.num_reused_tokens


@pytest.mark.parametrize("end", [-1, 8, 2.5, True])
def test_messages_end_inside_their_prompt(end):
    decoder = BatchDecoder(tiny_model(1), max_length=64)
    with pytest.raises(UsageError, match="messages_end is"):
        decoder.admit(Request(SYSTEM, GenerationConfig(4), messages_end=end))


@pytest.mark.parametrize("num_left_out", range(7))
def test_drafts_after_a_prefix_follow_the_prompt_where_it_leaves_the_kept_text(num_left_out):
    """A drafter has read a token more than the target, which the prompt must have, too.

    The target's own greedy drafts are all accepted, whatever was kept of another text.
    """
    target, tree = tiny_model(1), TokenTree.chain(3)
    decoder = BatchDecoder(target, target, tree, num_rows=1, max_length=96, num_prefixes=2)
    row = decoder.admit(Request(SYSTEM, GenerationConfig(60, ignore_eos=True)))
    for _ in range(3):
        decoder.step()
    text = [*SYSTEM, *decoder.release(row, keep=True).tokens]
    begin, end = text[: len(text) - num_left_out], text[len(text) - num_left_out :]
    prompt = [*begin, (end[0] + 1) % 61 if end else 5, 7]
    (out,) = decoder.generate([Request(prompt, GenerationConfig(13, ignore_eos=True))])
    assert out.stats.accepted_per_call == [3, 3, 3]


def test_nothing_is_kept_of_a_row_that_ends_with_an_error():
    target = tiny_model(1)
    with torch.no_grad():
        target.head_weight.fill_(torch.nan)
    decoder = BatchDecoder(target, num_rows=1, max_length=64, num_prefixes=2)
    row = decoder.admit(Request(SYSTEM, GenerationConfig(4)))
    (report,) = decoder.step()
    assert report.error is not None
    decoder.release(row, keep=True)
    assert decoder.num_reusable([*SYSTEM, 4, 4, 4]) == 0
