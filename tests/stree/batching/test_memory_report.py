"""A report says of a sequence's memory what one more row takes, tensor by tensor."""

import pytest
import torch
from torch import Tensor, nn
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder
from stree.batching import memory_report
from stree.batching.memory_report import MemoryReport
from stree.models.joint import BACKTRACKING
from stree.models.layer_caches import KEYS, NODES, STATES
from stree_kernels import ops

GATED_DELTA = dict(
    layer_types=("gated_delta", "attention"), num_layers=2, attn_layers=(1,), d_conv=4,
    num_delta_heads=4, num_delta_key_heads=2, delta_key_dim=16, delta_value_dim=24,
)
TARGETS = {
    "hybrid": dict(d_state=64),
    "mamba": dict(attn_layers=(), d_state=64),
    "attention": dict(attn_layers=(0, 1, 2)),
    "short-conv": dict(layer_types=("short_conv", "attention", "short_conv"), attn_layers=(1,)),
    "gated-delta": GATED_DELTA,
}


def tensors_of(held: object, seen: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return all tensors that an object holds but models, by their storage."""
    if isinstance(held, Tensor):
        seen[held.untyped_storage().data_ptr()] = held
    elif isinstance(held, dict | list | tuple):
        for each in held.values() if isinstance(held, dict) else held:
            tensors_of(each, seen)
    elif hasattr(held, "__dict__") and not isinstance(held, nn.Module | type):
        tensors_of(vars(held), seen)
    return seen


def bytes_of(decoder: BatchDecoder) -> int:
    seen = tensors_of([decoder.cache, decoder.drafter, decoder.worker.state], {})
    return sum(each.untyped_storage().nbytes() for each in seen.values())


@pytest.mark.parametrize("kernels", ["naive", "fused"])
@pytest.mark.parametrize("backtracking", BACKTRACKING)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafter"])
@pytest.mark.parametrize("shape", TARGETS)
def test_a_sequence_takes_what_one_more_row_takes(
    shape, drafts, backtracking, kernels, monkeypatch
):
    """A row takes 200 bytes a node more: tokens, paths and settings, which are no cache."""
    monkeypatch.setattr(ops, "fused", lambda *_: kernels == "fused")  # they keep more of nodes
    target = tiny_model(1, torch.float32, **TARGETS[shape])
    drafter = right_now_and_then(target) if drafts else None

    def make(num_rows: int) -> BatchDecoder:
        return BatchDecoder(target, drafter, "paper" if drafts else None, num_rows=num_rows,
                            max_length=300, backtracking=backtracking)

    few, more = make(3), make(5)
    one_more = (bytes_of(more) - bytes_of(few)) / 2
    said = few.room
    assert said.parts == more.room.parts
    assert said.sequence_bytes <= one_more <= said.sequence_bytes + 200 * few.max_nodes
    assert ("drafter" in said.parts) == drafts
    assert (said.parts[KEYS] > 0) == bool(target.config.attn_layers)
    if shape in ("hybrid", "mamba", "gated-delta"):
        assert said.parts[STATES] > 0 and said.parts[NODES] > 0


def test_it_is_one_plain_line(monkeypatch):
    monkeypatch.setattr(memory_report, "free_memory_bytes", lambda on_cuda: 3 * 2**30)
    parts = {STATES: 2**25, KEYS: 2**24, NODES: 0, "drafter": 2**20}
    said = MemoryReport(16, 2048, 2, parts, 3 * 2**30)
    assert str(said) == (
        "16 sequences at once, of up to 2,048 tokens: 49.0 MiB a sequence in 2 decoders (states "
        "32.0 MiB, keys and values 16.0 MiB, drafter 1.0 MiB); 3.0 GiB are free, enough for 62 more"
    )
    target = tiny_model()
    one, other = (BatchDecoder(target, num_rows=rows, max_length=64) for rows in (4, 2))
    both = MemoryReport.together([one.room, other.room])
    assert both.num_rows == 2 and both.sequence_bytes == 2 * one.room.sequence_bytes
    assert one.room.num_more == 3 * 2**30 // one.room.sequence_bytes
