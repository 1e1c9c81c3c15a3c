"""Top-k, top-p, min-p and a repetition penalty of an evaluation: every method has them, at every
temperature, and rows of others stand in no one table."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from hand_made_run import make_run, relabelled
from tiny_evaluation import Lies, export, heard_by, quiet, row_of, settings_for
from transformers import RepetitionPenaltyLogitsProcessor

from stree.common.errors import InvariantBroken, UsageError
from stree_kernels import naive
from stree_pipelines.commands import compare
from stree_pipelines.commands.eval_spec import main as eval_spec
from stree_pipelines.commands.report import main as report
from stree_pipelines.evaluation.answering.answers import _least_change
from stree_pipelines.evaluation.arms import comparison_of
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import make_job, prompt_seed
from stree_pipelines.evaluation.records import ResultRow, SampleRow
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore, write_rows
from stree_pipelines.evaluation.sampling import OFF, sampling_of
from stree_pipelines.reports.profiles.drafter_profile import profile_of
from stree_pipelines.reports.profiles.model_card import _places
from stree_pipelines.reports.run_data import load_run, open_results
from stree_pipelines.reports.settings import setting_of

SERVED = {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
PENALTY = {"repetition_penalty": 1.3}

pytestmark = pytest.mark.usefixtures("one_thread")
error_if_greedy_is_warned_of = pytest.mark.filterwarnings("error:temperature is 0")


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    """Evaluate all methods with all four settings, and hear what every decoder was asked for."""
    asked = []
    make = heard_by(lambda tree, prompt_ids, generation, output: asked.append(generation))
    out = tmp_path_factory.mktemp("served")
    settings = settings_for(world, out, temperatures=(0.0, 1.0), **SERVED)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "temperature is 0")
        quiet(settings, make_decoder=make).evaluate(export(world, 10))
    return ResultStore(out), asked


def test_rows_and_samples_say_it_and_all_answers_are_plain_decodings(served):
    store, _ = served
    assert len(store.results()) == 6
    for row in store.results():
        assert sampling_of(row) == SERVED
        assert all(sampling_of(sample) == SERVED for sample in store.samples(row))
        if row.step is not None:
            assert (row.lossless.share, row.lossless.num_prompts) == (1.0, 4)
    drafted = [row_of(store, 10, "stree", t).acceptance_length for t in (0.0, 1.0)]
    assert min(drafted) > 1.5  # drafts are penalised, too: the noisy target accepts its own


def test_warm_ups_ask_for_the_same(served):
    """A decoder's first penalised step would otherwise be one that is timed."""
    _, asked = served
    for temperature, wanted in ((0.0, {**OFF, **PENALTY}), (1.0, SERVED)):
        settings = [sampling_of(each) for each in asked if each.temperature == temperature]
        assert len(settings) > 4 and all(each == wanted for each in settings)


@error_if_greedy_is_warned_of
def test_filters_are_warned_of_where_every_temperature_is_greedy(world, tmp_path):
    settings_for(world, tmp_path, temperatures=(0.0, 1.0), **SERVED)  # an error, were it warned of
    settings_for(world, tmp_path, temperatures=(0.0,), **PENALTY)
    with pytest.raises(UserWarning, match="does not read top_k, top_p, min_p: set a temp"):
        settings_for(world, tmp_path, temperatures=(0.0,), **SERVED)


def test_greedy_answers_are_those_of_transformers_penalty(served, world):
    store, _ = served
    settings = settings_for(world, store.directory, **SERVED)
    answerer = quiet(settings).answerer
    penalise = RepetitionPenaltyLogitsProcessor(SERVED["repetition_penalty"])
    sample = store.samples(row_of(store, None, "autoregressive"))[0]
    tokens = answerer.decoders.prompt_ids(answerer.decoders.benchmarks[0].prompts[0])
    start = len(tokens)
    with torch.no_grad():
        for _ in range(12):
            text = torch.tensor([tokens])
            tokens.append(int(penalise(text, answerer.decoders.target(text)[:, -1]).argmax()))
    assert list(sample.turns[0].tokens) == tokens[start:]
    unpenalised = quiet(settings_for(world, store.directory / "plain", limit=1))
    (row,) = unpenalised.evaluate(None)
    assert ResultStore(unpenalised.settings.out).samples(row)[0].turns[0] != sample.turns[0]


@pytest.mark.costly
@error_if_greedy_is_warned_of
def test_a_batch_has_the_same_answers(served, world, tmp_path):
    store, _ = served
    settings = settings_for(world, tmp_path, batch_size=3, temperatures=(0.0, 1.0), **SERVED)
    for row in quiet(settings).evaluate(export(world, 10)):
        alone = row_of(store, row.step, row.method, row.temperature)
        assert row.lossless is None or row.lossless.share == 1.0
        answers = [[turn.tokens for turn in s.turns] for s in ResultStore(tmp_path).samples(row)]
        assert answers == [[turn.tokens for turn in s.turns] for s in store.samples(alone)]


def job_of(world, out, **changes):
    settings = settings_for(world, out, **changes)
    benchmark = quiet(settings).benchmarks[0]
    plain = settings.method("autoregressive")
    return make_job(settings, plain, None, benchmark, 0.0, "target", "chat", "cpu")


def test_each_sampling_setting_is_another_decoding(world, tmp_path):
    same = job_of(world, tmp_path), job_of(world, tmp_path, **OFF)
    changed = [job_of(world, tmp_path, **{name: value}) for name, value in SERVED.items()]
    assert len({job.decoding_hash for job in same}) == 1
    assert len({job.decoding_hash for job in (*same, *changed)}) == 5
    typed = job_of(world, tmp_path, repetition_penalty=2)
    assert typed.decoding_hash == job_of(world, tmp_path, repetition_penalty=2.0).decoding_hash


def test_rows_have_them_even_if_they_are_off(served):
    store, _ = served
    row = store.results()[0]
    for each, kind in ((row, ResultRow), (store.samples(row)[0], SampleRow)):
        content = json.loads(each.model_dump_json())
        for name in OFF:
            rest = {other: value for other, value in content.items() if other != name}
            with pytest.raises(ValueError, match=f"{name}\n.*Field required"):
                kind.model_validate_json(json.dumps(rest))
    assert setting_of(row.model_copy(update=OFF))["repetition_penalty"] == "1.0"


def lie(world, out, temperature, **sampling):
    """Evaluation, the divergence that it found, and the target's logits there with what is before
    them."""
    settings = settings_for(
        world, out, limit=1, temperatures=[temperature], methods=("autoregressive", "stree"),
        **sampling,
    )
    evaluation = quiet(settings, make_decoder=Lies)
    with pytest.raises(InvariantBroken, match="position 3 has token"):
        evaluation.evaluate(export(world, 100))
    baseline, tree = ResultStore(out).results()
    (divergence,) = tree.lossless.divergences
    answerer = evaluation.answerer
    prompt = answerer.decoders.prompt_ids(answerer.decoders.benchmarks[0].prompts[0])
    text = [*prompt, *ResultStore(out).samples(baseline)[0].turns[0].tokens[:3]]
    with torch.no_grad():
        logits = answerer.decoders.target(torch.tensor([text]))[0, -1]
    return divergence, torch.tensor([text]), logits.double()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_divergence_s_gap_is_of_penalised_logits(world, tmp_path, temperature):
    """A penalty below 1 asks for tokens again, so the best are of the prompt and the answer."""
    divergence, text, logits = lie(world, tmp_path, temperature, repetition_penalty=0.2)
    logits = RepetitionPenaltyLogitsProcessor(0.2)(text, logits[None])[0]
    if temperature:
        seed = torch.tensor([prompt_seed(0, "talk", "a", 0)])
        logits += naive.token_noise(seed, torch.tensor([[text.shape[1]]]), len(logits))[0, 0]
    first, second = logits.topk(2).values.tolist()
    assert divergence.logit_gap == pytest.approx(first - second, abs=1e-6)


def test_a_divergence_s_gap_is_a_number_also_where_one_token_is_left(world, tmp_path):
    """Its second choice has −∞: how far the other token is from being the best is the gap."""
    divergence, _, logits = lie(world, tmp_path, 1.0, top_k=1)
    apart = logits[divergence.autoregressive_token] - logits[divergence.token]
    first, second = logits.topk(2).values
    assert divergence.logit_gap == pytest.approx(min(apart, first - second).item(), rel=1e-4)


def test_what_is_left_out_by_a_hair_ties():
    logits, noise = torch.tensor([2.0, 1.0, 1.0 - 1e-5, -3.0]), torch.tensor([0.0, 0.0, 4.0, 9.0])

    def best_of_two(logits):
        return int((logits + noise).masked_fill(logits < logits.sort().values[-2], -1e9).argmax())

    assert best_of_two(logits.double()) == 0
    assert _least_change(logits, best_of_two, {2}) == pytest.approx(1e-5, rel=1e-2)
    assert _least_change(logits, best_of_two, {0, 3}) == pytest.approx(1.0, rel=1e-2)
    kept_by_a_hair = torch.tensor([2.0, 1.0 - 1e-5, 1.0, -3.0])
    assert best_of_two(kept_by_a_hair.double()) == 2
    assert _least_change(kept_by_a_hair, best_of_two, {1}) == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 1.5}, "top_p is 1.5, wanted above 0 and at most 1"),
        ({"top_k": -1}, r"top_k is -1, wanted 0 \(off\) to 2⁶³ − 1"),
        ({"min_p": 2.0}, r"min_p is 2.0, wanted 0 \(off\) to 1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0.0, wanted 0.00001 to 100000"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"top_k": "many"}, "top_k is 'many', wanted a (whole )?number"),
    ],
)
def test_a_bad_value_is_one_clear_error_before_anything_is_loaded(
    world, tmp_path, changes, message
):
    with pytest.raises(UsageError, match=message):
        settings_for(world, tmp_path, **changes)
    content = {
        "target": str(world / "target"), "out": "out", "benchmarks": [str(world / "talk.jsonl")],
        "arms": [{"name": "x", "drafter": str(export(world, 10))}], **changes,
    }
    with pytest.raises(UsageError, match=message):
        comparison_of(content, tmp_path / "arms.yaml", {})


def test_a_config_takes_them_and_a_dry_run_says_them(world, tmp_path, capsys):
    (tmp_path / "eval.yaml").write_text("top_p: 0.9\nrepetition_penalty: 1.3\n")
    common = [
        "--benchmarks", str(world / "talk.jsonl"), "--device", "cpu", "--limit", "1",
        "--temperatures", "0", "1", "--ignore_eos", "--max_new_tokens", "4", "--dry_run",
    ]
    where = ["--target", str(world / "target"), "--out", str(tmp_path / "out")]
    one = ["--checkpoint", str(export(world, 10))]
    eval_spec(["--config", str(tmp_path / "eval.yaml"), *where, *one, *common])
    told = "sampling: top_p 0.9, repetition_penalty 1.3, at every temperature and by every method"
    assert told in capsys.readouterr().out.splitlines()
    eval_spec([*where, *one, *common])
    assert "sampling:" not in capsys.readouterr().out
    arms = [{"name": "tree", "drafter": str(export(world, 10))}]
    given = {"out": str(tmp_path), "target": str(world / "target"), "top_p": 0.9, "arms": arms}
    (tmp_path / "arms.yaml").write_text(json.dumps(given))
    compare.main([str(tmp_path / "arms.yaml"), *common, "--repetition-penalty", "1.3"])
    assert told in capsys.readouterr().out.splitlines()


@pytest.mark.costly
def test_a_comparison_s_arms_all_have_them_and_its_table_says_so(world, tmp_path):
    compare_file = tmp_path / "arms.yaml"
    compare_file.write_text(
        f"target: {world / 'target'}\nbenchmarks: ['{world / 'talk.jsonl'}']\nlimit: 1\n"
        f"out: {tmp_path / 'out'}\ntemperatures: [0]\nmax_new_tokens: 6\nignore_eos: true\n"
        "device: cpu\nrepetition_penalty: 1.3\n"
        f"arms: [{{name: tree, drafter: '{export(world, 10)}'}}, {{name: text, drafter: ngram}}]\n"
    )
    compare.main([str(compare_file)])
    rows = ResultStore(tmp_path / "out").results()
    assert [row.method for row in rows] == ["autoregressive", "tree", "text"]
    assert {row.repetition_penalty for row in rows} == {1.3}
    assert all(row.lossless is None or row.lossless.share == 1.0 for row in rows)
    for name in ("comparison.md", "comparison.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "All methods were decoded with repetition_penalty 1.3." in text


@pytest.fixture(scope="module")
def penalised_run(tmp_path_factory):
    """A hand-made run, with the same rows once more of another penalty."""
    run = make_run(tmp_path_factory.mktemp("run"), ("gsm8k",), (0.0,))
    store = ResultStore(run / "eval")
    again = [
        relabelled(store, row, decoding_hash=f"{row.decoding_hash} again", **PENALTY)
        for row in store.results()
    ]
    write_rows(store.directory / RESULTS_NAME, [*store.results(), *again])
    return run


def test_rows_of_two_penalties_stand_in_no_one_table(penalised_run, tmp_path):
    with pytest.raises(UsageError, match=r"repetition_penalty is 1\.0 \(7 rows\) or 1\.3"):
        load_run(penalised_run)
    report([str(penalised_run), "--show", "repetition_penalty=1.3", "--out", str(tmp_path)])
    for name in ("table6.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "All methods were decoded with repetition_penalty 1.3." in text
    assert '"repetition_penalty": "1.3"' in (tmp_path / "table6.json").read_text()
    report([str(penalised_run), "--show", "repetition_penalty=1.0", "--out", str(tmp_path)])
    assert not any("were decoded with" in (tmp_path / name).read_text()
                   for name in ("table6.md", "report.html"))


def test_a_profile_and_its_card_say_what_they_were_measured_with(penalised_run):
    store = open_results(penalised_run)
    with pytest.raises(UsageError, match="repetition_penalty is"):
        profile_of(store, penalised_run, "10000")
    profile = profile_of(store, penalised_run, "10000", shown=["repetition_penalty=1.3"])
    assert {each.repetition_penalty for each in profile.measurements} == {1.3}
    (place,) = _places(profile.measurements)
    assert "(EOS ignored), repetition_penalty 1.3, commit" in place["conditions"]


def test_an_evaluation_says_it_when_it_begins(world, tmp_path):
    said = []
    evaluation = quiet(settings_for(world, tmp_path, **PENALTY))
    evaluation.progress.say = said.append
    Evaluation.announce(evaluation, 1)
    assert said[0].endswith(", float32, repetition_penalty 1.3")
