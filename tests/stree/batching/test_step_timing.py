"""Steps are timed on rows that differ as the rows of requests do."""

from __future__ import annotations

from toys import tiny_model

from stree import BatchDecoder
from stree.batching.step_timing import measure_step_times, tokens_of_row
from stree.generation import GenerationConfig
from stree.models.layers import mlp
from stree.tree_policy.adaptive import PLAIN

EXPERTS = dict(num_experts=64, experts_per_token=1, expert_intermediate_size=4)


def test_rows_have_different_tokens_at_each_position():
    for vocab_size, count in ((2048, 64), (151_936, 64), (320, 16)):
        rows = [tokens_of_row(row, 100, vocab_size) for row in range(count)]
        assert all(len(set(tokens)) == count for tokens in zip(*rows, strict=True))
        assert all(len(set(tokens)) == 100 for tokens in rows)
        assert rows == [tokens_of_row(row, 100, vocab_size) for row in range(count)]


def test_rows_of_a_timed_step_choose_different_experts(monkeypatch):
    """Rows of one token would choose one expert, and the step would read one expert's weights."""
    target = tiny_model(
        vocab_size=512, num_layers=2, attn_layers=(), layer_types=("mamba", "experts"), **EXPERTS
    )
    decoder = BatchDecoder(target, num_rows=8, max_length=64)
    chosen, choose = [], mlp.ops.choose_experts

    def spied(*arguments):
        found = choose(*arguments)
        chosen.append(found[1].flatten().tolist())
        return found

    monkeypatch.setattr(mlp.ops, "choose_experts", spied)
    for temperature in (0.0, 1.0):
        chosen.clear()
        generation = GenerationConfig(temperature=temperature)
        measure_step_times(
            decoder, decoder.scheduler, decoder.worker, [PLAIN], 16, 2, [8], generation, 64
        )
        steps = [each for each in chosen if len(each) == 8]
        assert len(steps) > 4 and all(len(set(each)) >= 4 for each in steps)
