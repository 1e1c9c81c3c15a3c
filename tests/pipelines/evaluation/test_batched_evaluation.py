"""Evaluation of several prompts at once: what it gives is what one at a time gives."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from functools import partial

import pytest
import torch
from lanes import quick_first
from tiny_evaluation import (
    PROMPTS,
    export,
    quiet,
    row_of,
    samples_without_timings,
    settings_for,
    without_timings,
)

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.common.errors import InvariantBroken, OutOfMemory
from stree.decoder import Decoder
from stree.generation import GenerationConfig
from stree.models.model import HybridModel
from stree.tree_policy.adaptive import PLAIN, AdaptiveTrees
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.evaluation.answering import answers, decoders
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.result_store import ResultStore

OF_THE_BATCH = {
    "batch_size", "decoding_hash", "call_share", "samples", "rows_per_call", "num_reused_tokens",
}


pytestmark = pytest.mark.usefixtures("one_thread")


class OneRow:
    """The batched decoder as a decoder of one sequence."""

    def __init__(self, *args, **kwargs) -> None:
        self.batch = BatchDecoder(*args, num_rows=1, **kwargs)

    def generate(self, prompt_ids, generation):
        return self.batch.generate([Request(prompt_ids, generation)])[0]

    def num_reusable(self, prompt_ids):
        return self.batch.num_reusable(prompt_ids)


def evaluated(world, out, batch_size, **parts) -> ResultStore:
    """Evaluate the middling drafter at T = 0 and 1."""
    settings = settings_for(world, out, temperatures=(0.0, 1.0), batch_size=batch_size)
    quiet(settings, **parts).evaluate(export(world, 10))
    return ResultStore(out)


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    """Evaluate one prompt at a time, with the batched decoder's random numbers."""
    return evaluated(world, tmp_path_factory.mktemp("alone"), 1, make_decoder=OneRow)


@pytest.fixture(scope="module")
def batched(world, tmp_path_factory):
    return evaluated(world, tmp_path_factory.mktemp("batched"), 3)


@pytest.mark.costly
def test_how_many_prompts_fit_at_once_is_said_once_and_why(world, tmp_path):
    """The line counts all methods' decoders together; a batch of one has none."""
    for batch_size in (3, 1):
        settings = settings_for(world, tmp_path / str(batch_size), limit=1, batch_size=batch_size)
        stream = io.StringIO()
        evaluation = Evaluation(settings, workers=Workers(), progress=EvaluationProgress(stream))
        for step in (1, 10):
            evaluation.evaluate(export(world, step))
        said = [line for line in stream.getvalue().splitlines() if "a sequence" in line]
        assert len(said) == (batch_size > 1)
        if said:
            assert re.fullmatch(
                r"3 sequences at once, of up to [\d,]+ tokens: [\d.]+ KiB a sequence in 3 decoders "
                r"\(states .*, nodes of trees .*, drafter .*\); .* are free, "
                r"enough for [\d,]+ more",
                said[0],
            )


def but_for_the_batch(records: list[dict]) -> list[dict]:
    return [{n: v for n, v in each.items() if n not in OF_THE_BATCH} for each in records]


def greedy_samples(store: ResultStore) -> list[dict]:
    return [each for each in samples_without_timings(store) if each["temperature"] == 0]


@pytest.mark.costly
def test_tokens_do_not_depend_on_the_batch(world, tmp_path, alone, batched):
    """Sampled tokens do not, either: they are a function of the prompt's seed."""
    one = evaluated(world, tmp_path / "one", 1)
    eight = evaluated(world, tmp_path / "eight", 8)
    wanted = but_for_the_batch(samples_without_timings(alone))
    for store in (one, batched, eight):
        assert but_for_the_batch(samples_without_timings(store)) == wanted
    rows = [but_for_the_batch(without_timings(store.results())) for store in (batched, eight)]
    assert rows[0] == rows[1] == but_for_the_batch(without_timings(alone.results()))
    lossless = [row["lossless"]["share"] for row in rows[0] if row["lossless"]]
    assert lossless == [1, 1, 1, 1]


@pytest.mark.costly
@pytest.mark.parametrize("batch_size", [1, 3])
def test_earlier_turns_are_not_read_again(batch_size, world, tmp_path, monkeypatch):
    """Their answers stay what they are; where one comes back through the tokenizer as other tokens,
    the prompt before it is reused all the same."""
    prefill, read = HybridModel.prefill, Counter()

    def counting(model, tokens, *arguments):
        read[kept] += tokens.numel()
        return prefill(model, tokens, *arguments)

    monkeypatch.setattr(HybridModel, "prefill", counting)
    parts = {"num_rows": batch_size} if batch_size > 1 else {}
    make = partial(BatchDecoder if batch_size > 1 else Decoder, **parts)

    def forgetting(*arguments, num_prefixes, **others):
        assert num_prefixes > 0
        return make(*arguments, **others)

    stores = []
    for kept, made in ((True, make), (False, forgetting)):
        settings = settings_for(
            world, tmp_path / str(kept), batch_size=batch_size, limit=2,
            methods=("autoregressive", "stree"),
        )
        quiet(settings, make_decoder=made).evaluate(export(world, 10))
        stores.append(ResultStore(settings.out))
    rows = [without_timings(each.results()) for each in stores]
    ours, theirs = map(samples_without_timings, stores)
    reused = [each.pop("num_reused_tokens") for each in ours]
    assert not any(each.pop("num_reused_tokens") for each in theirs)
    assert ours == theirs and rows[0] == rows[1]
    first_turns = [each["turns"][0]["num_prompt_tokens"] for each in ours]
    several = [len(each["turns"]) > 1 for each in ours]
    assert [bool(each) for each in reused] == several and any(several)
    assert all(not each or each >= first for each, first in zip(reused, first_turns, strict=True))
    assert read[True] < read[False]


def test_rows_and_samples_say_the_batch(batched, alone):
    assert {row.batch_size for row in alone.results()} == {1}
    for row in batched.results():
        assert row.batch_size == 3
        assert {sample.batch_size for sample in batched.samples(row)} == {3}
        # Five turns in three rows: full at first, not to the end.
        assert 1 < row.rows_per_call < 3
        assert row.time_ms == {} == row.baseline_time_ms
    for mine, theirs in zip(batched.results(), alone.results(), strict=True):
        assert mine.decoding_hash != theirs.decoding_hash


def test_speeds_are_of_the_whole_batch(batched):
    """Seconds of all prompts add up to the wall time, so that a speedup is that of throughput."""
    plain = {
        sample.prompt_id: sample
        for sample in batched.samples(row_of(batched, None, "autoregressive"))
    }
    row = row_of(batched, 10, "stree")
    samples = batched.samples(row)
    assert row.tokens_per_second == pytest.approx(
        sum(s.num_new_tokens for s in samples) / sum(s.decode_s for s in samples)
    )
    theirs = sum(s.num_new_tokens for s in plain.values()) / sum(
        s.baseline.decode_s for s in samples
    )
    assert row.speedup == pytest.approx(row.tokens_per_second / theirs)
    for sample in samples:  # measured beside, in the run whose row was published too
        assert sample.baseline.decode_s == plain[sample.prompt_id].decode_s
    assert row.confidence_intervals["speedup"] is not None


@pytest.mark.costly
@pytest.mark.parametrize("batch_size", [1, 3])
def test_warm_ups_teach_nothing(batch_size, world, tmp_path):
    """A choice that learned from warm-ups' few tokens would take no tree."""
    settings = settings_for(
        world, tmp_path, batch_size=batch_size, methods=["stree"], tree="chain-1 or paper"
    )
    evaluation = quiet(settings)
    (job,) = evaluation.plan(export(world, 10))
    decoder = evaluation.decoders.warm(job, [3, 5, 7])
    adaptive_trees = getattr(decoder, "batch", decoder).tree_policy
    fresh = AdaptiveTrees(adaptive_trees.trees)
    assert adaptive_trees.state.current == fresh.state.current != PLAIN
    assert adaptive_trees.state.acceptance.revise() == fresh.state.acceptance.revise()
    decoder.generate([3, 5], GenerationConfig(20, ignore_eos=True))
    learned = adaptive_trees.state.acceptance.revise()
    assert evaluation.decoders.warm(job, [3, 5, 7, 9]) is decoder
    assert adaptive_trees.state.acceptance.revise() == learned
    evaluation.decoders.begin(job)  # other prompts
    assert adaptive_trees.state.acceptance.revise() == fresh.state.acceptance.revise()


@pytest.mark.costly
@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_chooses_has_seen_the_first_prompts_before_an_answer_counts(
    batch_size, world, tmp_path, monkeypatch
):
    """A choice has learned from nothing else, also where an evaluation goes on at its end."""
    monkeypatch.setattr("stree_pipelines.evaluation.plan.NUM_FIRST_PROMPTS", 2)
    settings = settings_for(
        world, tmp_path, batch_size=batch_size, methods=["stree"], tree="chain-1 or paper",
        temperatures=[0.0],
    )
    evaluation = quiet(settings)
    (job,) = evaluation.plan(export(world, 10))
    prompts = job.benchmark.prompts
    first = settings.first_prompts(job.benchmark)
    assert len(first) == max(2, batch_size) < len(prompts) == 4
    turns, answerer = [], evaluation.answerer
    begin, add = answerer.decoders.begin, answerer._add_turn
    monkeypatch.setattr(
        answerer, "_add_turn",
        lambda conversation, *of: turns.append(conversation.prompt.id) or add(conversation, *of),
    )
    monkeypatch.setattr(answerer.decoders, "begin", lambda job: turns.append("begin") or begin(job))
    for answered in (prompts, prompts[3:]):
        turns.clear()
        samples = {each.prompt_id for each in answerer.answers(job, answered)}
        assert samples == {each.id for each in answered}
        shown = [each.id for each in first for _ in each.turns]
        wanted = [each.id for each in answered for _ in each.turns]
        assert turns[0] == "begin"
        assert sorted(turns[1 : 1 + len(shown)]) == sorted(shown)
        assert sorted(turns[1 + len(shown) :]) == sorted(wanted)


def test_free_rows_go_to_the_next_turn_and_the_next_prompt(world, tmp_path):
    """A long answer's row is not waited for; a conversation's next turn goes first."""
    admitted, steps = [], 0

    class Counted(BatchDecoder):
        def admit(self, request):
            admitted.append((steps, len(request.prompt_ids)))
            return super().admit(request)

        def step(self):
            nonlocal steps
            steps += 1
            return super().step()

    prompts = [*PROMPTS[:2], *({**PROMPTS[2], "id": f"c{i}"} for i in range(4))]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    settings = settings_for(
        world, tmp_path / "out", batch_size=2, methods=["autoregressive"],
        benchmarks=[str(tmp_path / "talk.jsonl")],
    )
    make = partial(Counted, num_rows=2)
    (row,) = quiet(settings, make_decoder=make).evaluate(None)
    warm_up, answering = admitted[:5], admitted[5:]  # 2, and graphs for 2 rows and for 1
    assert len(answering) == 7 and len({length for _, length in warm_up}) == 1
    turns = [t for s in ResultStore(tmp_path / "out").samples(row) for t in s.turns]
    second = turns[2].num_prompt_tokens
    assert [length for _, length in answering][2] == second  # before the prompts that wait
    # Seven answers of twelve tokens in two rows: four waves, of eleven calls each.
    assert row.rows_per_call == pytest.approx(77 / 44)


class Killed(Exception):
    pass


def dying(num_steps: int):
    """A decoder that goes as a kill goes, so many steps after the warm-up."""
    left = num_steps

    class Dying(Watched):
        def step(self):
            nonlocal left
            if left == 0:
                raise Killed
            left -= bool(self.seeds)
            return super().step()

    return partial(Dying, num_rows=3)


class Watched(BatchDecoder):
    """Knows the seeds of what it was asked, but for warm-ups, which have none."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seeds = []

    def admit(self, request):
        self.seeds += [request.generation.seed] if request.generation.seed else []
        return super().admit(request)


@pytest.mark.parametrize("survived", quick_first([(30,)], [(12,), (38,)]))
def test_a_kill_loses_what_is_under_way_and_no_more(world, tmp_path, survived, batched):
    settings = settings_for(world, tmp_path, temperatures=(1.0,), batch_size=3)
    with pytest.raises(Killed):
        quiet(settings, make_decoder=dying(survived)).evaluate(export(world, 10))
    store, made = ResultStore(tmp_path), []

    def make(*args, **kwargs):
        made.append(Watched(*args, num_rows=3, **kwargs))
        return made[-1]

    evaluation = quiet(settings, make_decoder=make)
    plain, _, tree = evaluation.plan(export(world, 10))
    done = {job.method: {key[4] for key in store.journalled(job.samples_name)}
            for job in (plain, tree)}
    assert done["autoregressive"] and (done["stree"] or survived < 38)
    evaluation.evaluate(export(world, 10))
    (decoder,) = (each for each in made if each.tree.name == "paper")
    first_seeds = {answers.prompt_seed(0, "talk", each, 0): each for each in "abcd"}
    asked = {first_seeds[seed] for seed in decoder.seeds if seed in first_seeds}
    assert asked == set("abcd") - done["stree"]
    got = samples_without_timings(store)
    wanted = [each for each in samples_without_timings(batched) if each["temperature"] == 1]
    assert but_for_the_batch(got) == but_for_the_batch(wanted)
    drafted = [s for row in store.results() if row.step for s in store.samples(row)]
    assert len(drafted) == 8 and all(sample.baseline for sample in drafted)


def test_the_error_of_a_row_is_its_prompt_s(world, tmp_path):
    """The prompts beside it are finished and saved, second turns included; those behind wait."""

    class Failing(BatchDecoder):
        failed = False

        def step(self):
            reports = super().step()
            for report in reports:
                if report.finish_reason and report.row == 0 and not self.failed:
                    self.failed = True
                    report.finish_reason = "error"
                    report.error = InvariantBroken("the target's logits are not finite")
            return reports

    settings = settings_for(world, tmp_path, batch_size=2, methods=["stree"], ignore_eos=False)
    evaluation = quiet(settings, make_decoder=partial(Failing, num_rows=2))
    evaluation.decoders._warm.update(
        (*job.decoder_key, ("temperature", 0.0)) for job in evaluation.plan(export(world, 100))
    )
    with pytest.raises(InvariantBroken, match="talk prompt a, turn 0, tree: the target's logits"):
        evaluation.evaluate(export(world, 100))
    (job,) = evaluation.plan(export(world, 100))
    assert [key[4] for key in ResultStore(tmp_path).journalled(job.samples_name)] == ["b"]


def test_graphs_that_do_not_fit_leave_no_row_taken(world, tmp_path):
    """The error names the batch; plain decoding's decoder goes on with the next checkpoint."""

    class Large(BatchDecoder):
        is_full = True

        def prepare(self):
            if Large.is_full:
                raise torch.OutOfMemoryError("CUDA out of memory")

    evaluation = quiet(
        settings_for(world, tmp_path, batch_size=2, limit=1),
        make_decoder=partial(Large, num_rows=2),
    )
    wanted = "warm-up, batch_size 2: CUDA out of memory; lower batch_size or max_new_tokens"
    with pytest.raises(OutOfMemory, match=wanted):
        evaluation.evaluate(export(world, 1))
    Large.is_full = False
    assert len(evaluation.evaluate(export(world, 10))) == 3


def test_a_conversation_that_outgrows_its_room_gets_more(world, tmp_path, batched, monkeypatch):
    """The larger decoder is made when the conversations under way are finished."""
    made = []

    def make(*args, **kwargs):
        made.append(kwargs["max_length"])
        return BatchDecoder(*args, num_rows=3, **kwargs)

    monkeypatch.setattr(decoders.Decoders, "max_length", 1)
    settings = settings_for(world, tmp_path, batch_size=3)
    quiet(settings, make_decoder=make).evaluate(export(world, 10))
    got = samples_without_timings(ResultStore(tmp_path))
    assert but_for_the_batch(got) == but_for_the_batch(greedy_samples(batched))
    assert len(set(made)) == 2  # a second turn needs more than any first


def test_methods_of_one_tree_do_not_share_a_decoder(world, tmp_path):
    """They are under way at the same time."""
    tree = tmp_path / "chain-4.yaml"
    tree.write_text("name: chain-4\nparents: [-1, 0, 1, 2, 3]\n")
    settings = settings_for(world, tmp_path / "out", batch_size=2, tree=str(tree))
    rows = quiet(settings).evaluate(export(world, 10))
    assert rows[1].acceptance_histogram == rows[2].acceptance_histogram
    assert rows[1].tree == rows[2].tree
