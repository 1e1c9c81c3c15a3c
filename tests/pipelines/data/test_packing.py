"""Packing: every useful sample stands in exactly one place, whole or cut to a row."""

import numpy as np
import pytest

from stree_pipelines.data.packing import TokenTable, make_batch, pack, shared_out

PAD = -7


def random_table(seed, num_samples=300, longest=90):
    """Make samples of unique tokens, so that a token tells its sample."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, num_samples)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    tokens = np.arange(offsets[-1], dtype=np.int32)
    return TokenTable(tokens, rng.random(offsets[-1]) < 0.1, offsets)


def table_of(lengths, first_masked=0):
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    mask = np.concatenate([np.arange(n) >= first_masked for n in lengths])
    return TokenTable(np.arange(offsets[-1], dtype=np.int32), mask, offsets)


@pytest.mark.parametrize("T", [2, 7, 64, 89, 500])
@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_each_useful_sample_once(T, seed):
    table = random_table(seed)
    order = np.random.default_rng(seed).permutation(len(table))
    packing = pack(table, T, order, window=50)
    heads = [np.arange(a, min(a + T, b)) for a, b in
             zip(table.offsets[:-1], table.offsets[1:], strict=True)]
    useful = [i for i, head in enumerate(heads) if table.mask[head[1:]].any()]
    assert sorted(packing.samples.tolist()) == useful
    assert packing.num_unused == len(table) - len(useful)
    assert packing.num_truncated == sum(table.lengths[i] > T for i in useful)
    assert packing.num_dropped_tokens == sum(max(0, table.lengths[i] - T) for i in useful)

    batch = make_batch(table, packing, range(len(packing)), PAD)
    tokens, segments, loss = batch["tokens"], batch["segment_ids"], batch["loss_mask"]
    assert {name: (a.shape, a.dtype.name) for name, a in batch.items()} == {
        "tokens": ((len(packing), T), "int64"),
        "segment_ids": ((len(packing), T), "int64"),
        "loss_mask": ((len(packing), T), "bool"),
    }
    assert (segments[:, 0] == 0).all() and np.isin(np.diff(segments, axis=1), (0, 1)).all()
    seen = []
    for row in range(len(packing)):
        for segment in np.unique(segments[row]):
            inside = segments[row] == segment
            found = tokens[row, inside]
            if found[0] == PAD:  # padding is alone in its segment, and last
                assert (found == PAD).all() and segment == segments[row, -1]
                assert not loss[row, inside].any()
                continue
            sample = int(np.searchsorted(table.offsets, found[0], side="right")) - 1
            assert found.tolist() == heads[sample].tolist()
            assert not loss[row, inside][0]
            assert loss[row, inside][1:].tolist() == table.mask[heads[sample][1:]].tolist()
            seen.append(sample)
    assert sorted(seen) == useful


def test_packing_is_a_function_of_its_arguments():
    table, order = random_table(1), np.random.default_rng(1).permutation(300)
    one, two = pack(table, 64, order), pack(table, 64, list(order))
    assert np.array_equal(one.samples, two.samples) and np.array_equal(one.starts, two.starts)
    other = pack(table, 64, order[::-1].copy())
    assert not np.array_equal(one.samples, other.samples)


def test_rows_are_full():
    """With chat-like lengths at least 98 % of the positions hold a token."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.5, 0.8, 5000).astype(int) + 2, 3000)
    packing = pack(table_of(lengths), 1024, np.arange(5000))
    assert np.minimum(lengths, 1024).sum() / (len(packing) * 1024) > 0.98


def test_best_fit_by_hand():
    table = table_of([6, 5, 4, 3, 2])
    packing = pack(table, 10, range(5))
    rows = [packing.samples[a:b].tolist() for a, b in
            zip(packing.starts[:-1], packing.starts[1:], strict=True)]
    assert rows == [[0, 2], [1, 3, 4]]


def test_long_samples_are_cut_and_counted_and_hopeless_ones_left_out():
    table = table_of([30, 5, 30], first_masked=4)
    table.mask[35:] = False
    table.mask[50:] = True  # the last one speaks only beyond token 15
    packing = pack(table, 10, [0, 1, 2])
    assert sorted(packing.samples.tolist()) == [0, 1]
    assert (packing.num_truncated, packing.num_dropped_tokens, packing.num_unused) == (1, 20, 1)


def test_a_sample_whose_only_assistant_token_is_its_first_is_left_out():
    table = TokenTable(
        np.arange(4, dtype=np.int32), np.array([True, False, False, False]), np.array([0, 4])
    )
    assert len(pack(table, 8, [0])) == 0


@pytest.mark.parametrize("share,taken", [(2.6, 1), (3.2, 2), (4.6, 2), (5.4, 3)])
def test_mixing_takes_the_nearest_whole_sample(share, taken):
    """`share` tokens are wanted of samples of two: the nearest number of samples is taken."""
    table, other = table_of([2] * 5), table_of([2] * 5)
    order = np.arange(5)
    mixed, whole = shared_out([table, other], [share / 10, 1.0], [order, order])
    assert (len(mixed), len(whole)) == (taken, 5)
    assert mixed.tokens.tolist() == table.tokens[: 2 * taken].tolist()


def test_shares_are_taken_in_the_given_order():
    orders = [np.array([4, 1, 5, 0, 2, 3]), np.array([0])]
    part, rest = shared_out([table_of([2] * 6), table_of([3])], [2.0, 1.0], orders)
    assert part.tokens.tolist() == [2, 3, 8, 9, 10, 11]  # samples 1, 4 and 5
    assert rest.tokens.tolist() == [0, 1, 2]
