"""Judge drafts by their probabilities, without a distribution in memory (Triton).

Three kernels for all rules of `naive.accept_drafts`, the naive twin:

1. `rows_kernel` sums up each row of logits by pieces: the highest, and Σ e^{(x − highest) / T}.
2. `siblings_kernel` judges the children at one place of all nodes (multi-step), or of those of a
   level (traversal, where a node's share comes from its parent's): each child's chance, and by
   pieces the rest of the target's distribution, Σ max(a·p − q, 0), and of the drafter's, Σ q.
3. `walk_kernel`, a program a row, tosses the coins, walks, draws the token after the path, and
   commits it. To draw, it reads the one piece of logits that the sums name.

A token's rest after j siblings is a function of its two logits and of 2·j such sums, so that each
kernel computes it from the logits (`after_siblings`). A step takes 2 launches and one for each
place among siblings, for traversal on each level. Exponentials are as wide as
`naive.accumulation_dtype`, sums of pieces fp64.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree_kernels import naive
from stree_kernels.contracts import Sampling
from stree_kernels.launch import follow, overlapping
from stree_kernels.sampling import drafts as places
from stree_kernels.sampling.drafts import Drafts
from stree_kernels.sampling.uniforms import uniform

PIECE = 4096
RULES = ("naive", "multi_step", "traversal")
NAIVE, MULTI_STEP, TRAVERSAL = map(tl.constexpr, range(3))
ACCEPT, LEVEL, AFTER = map(tl.constexpr, (places.ACCEPT, places.LEVEL, places.AFTER))
NO_TOKEN = tl.constexpr(2**31 - 1)
# Nodes × pieces that the last kernel has in registers; of more, it walks some pieces a time.
MAX_PIECES_IN_REGISTERS = 2**14


# Tensors of the launches, pointers in the kernels. Rows of logits are a sequence's target's before
# its drafter's; highest, best and sums are of their pieces
LogitRows = namedtuple(
    "LogitRows",
    "target target_strides num_nodes drawn drawn_strides num_drawn "
    "temperature highest best sums vocabulary pieces",
)
# left (B, N, K, 2, pieces) is what siblings leave of target and drafter
JudgedTrees = namedtuple(
    "JudgedTrees", "tokens token_stride children widest drawn_by points independent shares left"
)
# Tensors to which an accepted path is written: see `naive.accept_choices`
PathOutputs = namedtuple(
    "PathOutputs",
    "path path_stride path_length block block_stride position root report report_stride",
)


def accept_drafts(
    rule: str, logits: Tensor, drafts: Drafts, sampling: Sampling, active: Tensor, path: Tensor,
    path_length: Tensor, block: Tensor, root: Tensor, report: Tensor,
    choose: naive.Choose | None = None,
) -> None:
    """Compute `naive.accept_drafts`; last strides are 1, trees' tensors but tokens contiguous.

    A given `choose` makes all random choices, in plain PyTorch.
    """
    if choose is not None:
        committed = (active, path, path_length, block, root, report)
        naive.accept_drafts(rule, logits, drafts, sampling, *committed, choose)
        return
    batch, num_nodes, vocabulary = logits.shape
    widest = drafts.children.shape[2]
    drawn = None if rule == "naive" else drafts.logits
    num_drawn = 0 if drawn is None else drawn.shape[1]
    assert logits.stride(2) == drafts.tokens.stride(1) == 1
    assert drawn is None or drawn.stride(2) == 1
    pieces, num_rows = triton.cdiv(vocabulary, PIECE), num_nodes + num_drawn

    def scratch(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=logits.device)

    rows = LogitRows(
        logits, logits.stride()[:2], num_nodes,
        drawn, (0, 0) if drawn is None else drawn.stride()[:2], num_drawn, sampling.temperature,
        scratch(num_rows, pieces), scratch(num_rows, pieces, dtype=torch.int32),
        scratch(num_rows, pieces), vocabulary, pieces,
    )
    points, finite = (
        None if each is None else each.view(torch.uint8) for each in (drafts.points, drafts.finite)
    )
    trees = JudgedTrees(
        drafts.tokens, drafts.tokens.stride(0), drafts.children, widest, drafts.drawn_by, points,
        int(drafts.independent), scratch(num_nodes), scratch(num_nodes, widest, 2, pieces),
    )
    options = dict(
        WIDE=tl.float64 if logits.dtype == torch.float64 else tl.float32, PIECE=PIECE, num_warps=4,
        **overlapping(logits),
    )
    rows_kernel[(batch * num_rows, pieces)](rows, **options)
    options |= dict(RULE=RULES.index(rule), PIECES=triton.next_power_of_2(pieces))
    for nodes, count, place in _judged(rule, drafts, num_nodes):
        siblings_kernel[(batch * count, pieces)](rows, trees, nodes, count, place, **options)
    num_flags = 1 if finite is None else finite[0].numel()
    nodes_block = triton.next_power_of_2(num_nodes)
    commit = PathOutputs(
        path, path.stride(0), path_length, block, block.stride(0), sampling.position, root,
        report, report.stride(0),
    )
    walk_kernel[(batch,)](
        rows, trees, commit, drafts.parents, finite, num_flags, active.view(torch.uint8),
        sampling.seed, widest, num_nodes, (report.shape[1] - 2) // 2,
        NODES=nodes_block, WIDEST=triton.next_power_of_2(widest),
        FLAGS=triton.next_power_of_2(num_flags),
        BESIDE=min(options["PIECES"], max(1, MAX_PIECES_IN_REGISTERS // nodes_block)),
        **{**options, "num_warps": min(16, max(4, nodes_block // 64))},
    )


def _judged(rule: str, drafts: Drafts, num_nodes: int) -> list[tuple[Tensor | None, int, int]]:
    """Yield for each launch the nodes (B, n) whose children it judges (None: all), n and place."""
    if rule == "multi_step":
        places = max((places.shape[2] for _, places in drafts.levels), default=0)
        return [(None, num_nodes, place) for place in range(places)]
    if rule == "traversal":
        return [
            (nodes, nodes.shape[1], place)
            for nodes, places in drafts.levels
            for place in range(places.shape[2])
        ]
    return []


@triton.jit
def rows_kernel(rows, WIDE: tl.constexpr, PIECE: tl.constexpr, OVERLAPS: tl.constexpr):
    follow(OVERLAPS)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, value = load_piece(rows, row, piece, WIDE, PIECE)
    # NaN would lose every comparison and hide: as the best of all it shows
    value = tl.where(value != value, float("inf"), value)
    high = tl.max(value, axis=0)
    temperature = tl.load(rows.temperature + row // (rows.num_nodes + rows.num_drawn))
    weight = scaled(value - high, temperature, WIDE)
    at = row * rows.pieces + piece
    tl.store(rows.highest + at, high.to(tl.float64))
    tl.store(rows.best + at, tl.min(tl.where(value == high, token, NO_TOKEN), axis=0))
    tl.store(rows.sums + at, tl.sum(weight, axis=0).to(tl.float64))


@triton.jit
def load_piece(rows, row, piece, WIDE: tl.constexpr, PIECE: tl.constexpr):
    """Load a piece's tokens, and their logits in a row."""
    token = piece * PIECE + tl.arange(0, PIECE)
    per_sequence = rows.num_nodes + rows.num_drawn
    sequence, at = row // per_sequence, row % per_sequence
    known = token < tl.where(at < rows.num_nodes, rows.vocabulary, 0)
    start = rows.target + sequence * rows.target_strides[0] + at * rows.target_strides[1]
    value = tl.load(start + token, mask=known, other=-float("inf")).to(WIDE)
    if rows.drawn is not None:
        at -= rows.num_nodes
        known = token < tl.where(at < 0, 0, rows.vocabulary)
        start = rows.drawn + sequence * rows.drawn_strides[0] + at * rows.drawn_strides[1]
        drawn = tl.load(start + token, mask=known, other=-float("inf")).to(WIDE)
        value = tl.where(at < 0, value, drawn)
    return token, value


@triton.jit
def scaled(below, temperature, WIDE: tl.constexpr):
    """Return e^{below / T} of logits less the highest one, and 0 if that is −∞, too."""
    by = tl.where(temperature > 0, temperature, 1.0).to(WIDE)
    return tl.where(below <= 0, tl.exp(below / by), 0.0)


@triton.jit
def row_sums(rows, row, temperature, PIECES: tl.constexpr):
    """Return a row's highest logit, the first token that has it, and the sums of its pieces. At
    temperature 0 all of the sum is on that token."""
    piece = tl.arange(0, PIECES)
    known = piece < rows.pieces
    at = row * rows.pieces + piece
    high = tl.load(rows.highest + at, mask=known, other=-float("inf"))
    token = tl.load(rows.best + at, mask=known, other=NO_TOKEN)
    part = tl.load(rows.sums + at, mask=known, other=0.0)
    top = tl.max(high, axis=0)
    best = tl.min(tl.where(high == top, token, NO_TOKEN), axis=0)
    part *= scaled(high - top, temperature, tl.float64)
    return top, best, tl.where(temperature > 0, part, (known & (token == best)).to(tl.float64))


@triton.jit
def weights(
    rows, row, piece, temperature, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr
):
    """Return a piece of a row's distribution, not normalised, with the row's sum."""
    token, value = load_piece(rows, row, piece, WIDE, PIECE)
    top, best, part = row_sums(rows, row, temperature, PIECES)
    weight = scaled(value - top.to(WIDE), temperature, WIDE)
    weight = tl.where(temperature > 0, weight, (token == best).to(WIDE))
    return token, weight, tl.sum(part, axis=0)


@triton.jit
def load_left(rows, trees, at, PIECES: tl.constexpr):
    """Load what a sibling left, by pieces.

    at counts two per child: the target's rest and the drafter's.
    """
    piece = tl.arange(0, PIECES)
    return tl.load(trees.left + at * rows.pieces + piece, mask=piece < rows.pieces, other=0.0)


@triton.jit
def is_undrawn(rows, trees, at):
    """Return True if a node was not drawn from logits."""
    if rows.drawn is None:
        return at >= 0
    elif trees.points is None:
        return at < 0
    else:
        return tl.load(trees.points + at) != 0


@triton.jit
def drawn_from(token, drafted, undrawn, q, q_sum, WIDE: tl.constexpr):
    """Return the distribution of the next sibling's draw.

    All of its mass is on the token where that is a point, or where the drafter had nothing left.
    """
    point = (token == drafted).to(WIDE)
    return tl.where(undrawn | (q_sum <= 0), point, q / tl.where(q_sum > 0, q_sum, 1.0).to(WIDE))


@triton.jit
def left_to_draw(trees, token, drafted, undrawn, q):
    """Remove a drawn token from the distribution of the next siblings (without replacement)."""
    return tl.where((token == drafted) & (undrawn == 0) & (trees.independent == 0), 0.0, q)


@triton.jit
def after_siblings(
    rows, trees, sequence, node, piece, count, share,
    RULE: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):
    """Return the rests that a node's first `count` children leave in one piece.

    These are the tokens; p, of the target's distribution; q, of the drafter's, with its sum; and
    of the node's share.
    """
    temperature = tl.load(rows.temperature + sequence)
    base = sequence * (rows.num_nodes + rows.num_drawn)
    token, p, p_sum = weights(rows, base + node, piece, temperature, WIDE, PIECE, PIECES)
    p /= p_sum.to(WIDE)
    row = sequence * rows.num_nodes + node
    q, q_sum = tl.zeros_like(p), p_sum * 0.0
    if rows.drawn is not None:
        drawn = base + rows.num_nodes + tl.load(trees.drawn_by + row)
        _, q, q_sum = weights(rows, drawn, piece, temperature, WIDE, PIECE, PIECES)
    for place in range(count):
        child = tl.load(trees.children + row * trees.widest + place)
        drafted = tl.load(trees.tokens + sequence * trees.token_stride + child)
        undrawn = is_undrawn(rows, trees, sequence * rows.num_nodes + child)
        offered = drawn_from(token, drafted, undrawn, q, q_sum, WIDE)
        at = (row * trees.widest + place) * 2
        rest = tl.sum(load_left(rows, trees, at, PIECES), axis=0)
        some = rest > 0
        rest = tl.where(some, rest, 1.0)
        p = tl.where(some, tl.maximum(share.to(WIDE) * p - offered, 0.0) / rest.to(WIDE), p)
        if RULE == TRAVERSAL:
            share = tl.where(some, rest / (rest + (1.0 - share)), 0.0)
        if rows.drawn is not None:
            q = left_to_draw(trees, token, drafted, undrawn, q)
            q_sum = tl.sum(load_left(rows, trees, at + 1, PIECES), axis=0)
    return token, p, q, q_sum, share


@triton.jit(do_not_specialize=["count", "place"])
def siblings_kernel(
    rows, trees, nodes, count, place,
    RULE: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    program, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, node = program // count, program % count
    if nodes is not None:
        node = tl.load(nodes + program)
    row = sequence * rows.num_nodes + node
    child = tl.load(trees.children + row * trees.widest + place, mask=node >= 0, other=-1)
    if child >= 0:
        share = tl.full((), 1.0, tl.float64)
        if RULE == TRAVERSAL:
            share = tl.load(trees.shares + row, mask=node > 0, other=1.0)
        token, p, q, q_sum, share = after_siblings(
            rows, trees, sequence, node, piece, place, share, RULE, WIDE, PIECE, PIECES
        )
        drafted = tl.load(trees.tokens + sequence * trees.token_stride + child)
        undrawn = is_undrawn(rows, trees, sequence * rows.num_nodes + child)
        offered = drawn_from(token, drafted, undrawn, q, q_sum, WIDE)
        p *= share.to(WIDE)
        q = left_to_draw(trees, token, drafted, undrawn, q)
        at = trees.left + (row * trees.widest + place) * 2 * rows.pieces + piece
        tl.store(at, tl.sum(tl.maximum(p - offered, 0.0), axis=0).to(tl.float64))
        tl.store(at + rows.pieces, tl.sum(q, axis=0).to(tl.float64))
        # The child's share, or, of multi-step, its chance: min(1, p / q) at its token
        wanted = tl.sum(tl.where(token == drafted, p, 0.0), axis=0).to(tl.float64)
        odds = tl.sum(tl.where(token == drafted, offered, 0.0), axis=0).to(tl.float64)
        chance = (wanted > 0).to(tl.float64)
        chance = tl.where(wanted < odds, wanted / tl.where(odds > 0, odds, 1.0), chance)
        at = trees.shares + sequence * rows.num_nodes + child
        tl.store(at, chance, mask=drafted // PIECE == piece)


@triton.jit(do_not_specialize=["widest", "num_nodes", "longest"])
def walk_kernel(
    rows, trees, commit, parents, finite, num_flags, active, seeds, widest, num_nodes, longest,
    RULE: tl.constexpr, NODES: tl.constexpr, WIDEST: tl.constexpr, FLAGS: tl.constexpr,
    BESIDE: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    follow(OVERLAPS)
    sequence = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(seeds + sequence), tl.load(commit.position + sequence)
    number, place = tl.arange(0, NODES), tl.arange(0, WIDEST)
    parent = tl.load(parents + sequence * num_nodes + number, mask=number < num_nodes, other=-2)
    some = number < 0
    if RULE == TRAVERSAL:
        some = subtrees_that_pass(
            rows, trees, sequence, parent, seed, position, widest, num_nodes, NODES, PIECES, BESIDE
        )
    path = commit.path + sequence * commit.path_stride
    report = commit.report + sequence * commit.report_stride
    decodes = tl.load(active + sequence).to(tl.int32)
    walking, count, node = decodes, decodes * 0, sequence * 0
    for step in range(longest):
        if walking == 1:
            tl.store(path + step, node)
            tl.store(report + 2 + longest + step, node)
            count += 1
            at = trees.children + (sequence * num_nodes + node) * widest + place
            child = tl.load(at, mask=place < widest, other=-1)
            token = tl.load(
                trees.tokens + sequence * trees.token_stride + child, mask=child >= 0, other=-1
            )
            if RULE == NAIVE:
                choice = draw(
                    rows, trees, sequence, node, 0, step, seed, position,
                    RULE, WIDE, PIECE, PIECES,
                )
                write(commit, sequence, step, longest, choice)
                kept = token == choice
            elif RULE == MULTI_STEP:
                at = trees.shares + sequence * num_nodes + child
                chance = tl.load(at, mask=child >= 0, other=0.0)
                kept = uniform(seed, position, place + ACCEPT + LEVEL * step) >= 1.0 - chance
            else:
                kept = child == tl.min(tl.where((parent == node) & some, number, NODES), axis=0)
            kept = kept & (child >= 0)
            first = tl.min(tl.where(kept, place, WIDEST), axis=0)
            walking = (first < WIDEST).to(tl.int32)
            if walking == 1:
                node = tl.sum(tl.where(place == first, child, 0), axis=0)
                if RULE != NAIVE:
                    choice = tl.sum(tl.where(place == first, token, 0), axis=0)
                    write(commit, sequence, step, longest, choice)
    if RULE != NAIVE:  # noqa: SIM102 (known when it is compiled, the other when it runs)
        if decodes == 1:
            at = trees.children + (sequence * num_nodes + node) * widest + place
            child = tl.load(at, mask=place < widest, other=-1)
            siblings = tl.sum((child >= 0).to(tl.int32), axis=0)
            choice = draw(
                rows, trees, sequence, node, siblings, 0, seed, position,
                RULE, WIDE, PIECE, PIECES,
            )
            write(commit, sequence, count - 1, longest, choice)
    if decodes == 1:
        tl.store(commit.block + sequence * commit.block_stride, count.to(tl.int64))
    tl.store(commit.path_length + sequence, count.to(tl.int64))
    tl.store(commit.position + sequence, position + count)
    code = are_finite(rows, finite, num_flags, sequence, num_nodes, NODES, PIECES, BESIDE, FLAGS)
    tl.store(report, code.to(tl.int64))
    tl.store(report + 1, count.to(tl.int64))


@triton.jit
def write(commit, sequence, step, longest, token):
    """Write a new token to the block, the report and the root, which the last token becomes."""
    tl.store(commit.block + sequence * commit.block_stride + 1 + step, token)
    tl.store(commit.report + sequence * commit.report_stride + 2 + step, token)
    tl.store(commit.root + sequence, token)


@triton.jit
def are_finite(
    rows, finite, num_flags, sequence, num_nodes,
    NODES: tl.constexpr, PIECES: tl.constexpr, BESIDE: tl.constexpr, FLAGS: tl.constexpr,
):
    """Return 1 if all logits are finite, 0 if the target's are not, −1 if the drafter's are not."""
    node = tl.arange(0, NODES)
    row = sequence * (rows.num_nodes + rows.num_drawn) + node
    known = (node < num_nodes)[:, None]
    top = tl.full([NODES], -float("inf"), tl.float64)
    for begin in tl.static_range(0, PIECES, BESIDE):
        piece = begin + tl.arange(0, BESIDE)
        at = rows.highest + row[:, None] * rows.pieces + piece[None, :]
        high = tl.load(at, mask=known & (piece < rows.pieces)[None, :], other=-float("inf"))
        top = tl.maximum(top, tl.max(high, axis=1))
    bad = (node < num_nodes) & (tl.abs(top) == float("inf"))
    drafted = 1
    if finite is not None:
        flag = tl.arange(0, FLAGS)
        flags = tl.load(finite + sequence * num_flags + flag, mask=flag < num_flags, other=1)
        drafted = tl.where(tl.min(flags.to(tl.int32), axis=0) == 1, 1, -1)
    return tl.where(tl.max(bad.to(tl.int32), axis=0) == 0, drafted, 0)


@triton.jit
def subtrees_that_pass(
    rows, trees, sequence, parent, seed, position, widest, num_nodes,
    NODES: tl.constexpr, PIECES: tl.constexpr, BESIDE: tl.constexpr,
):
    """Return which nodes pass, or have a subtree that does, with the share children leave."""
    node = tl.arange(0, NODES)
    row = sequence * num_nodes + node
    share = tl.load(trees.shares + row, mask=parent >= 0, other=1.0)
    for place in range(widest):
        at = row * widest + place
        child = tl.load(trees.children + at, mask=node < num_nodes, other=-1)
        rest = tl.zeros([NODES], tl.float64)
        for begin in tl.static_range(0, PIECES, BESIDE):
            piece = begin + tl.arange(0, BESIDE)
            there = (child >= 0)[:, None] & (piece < rows.pieces)[None, :]
            left = trees.left + (at * 2 * rows.pieces)[:, None] + piece[None, :]
            rest += tl.sum(tl.load(left, mask=there, other=0.0), axis=1)
        left = tl.where(rest > 0, rest / tl.where(rest > 0, rest + (1.0 - share), 1.0), 0.0)
        share = tl.where(child >= 0, left, share)
    some = (parent >= 0) & (uniform(seed, position, node + ACCEPT) >= 1.0 - share)
    for after in range(1, num_nodes):  # children come after their parents
        last = node == num_nodes - after
        passes = tl.sum(tl.where(last & some, 1, 0), axis=0)
        above = tl.sum(tl.where(last, parent, 0), axis=0)
        some = some | ((node == above) & (passes == 1))
    return some


@triton.jit
def draw(
    rows, trees, sequence, node, siblings, step, seed, position,
    RULE: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):
    """Draw the token after a node from the rest after its first children: a piece, then a token."""
    temperature = tl.load(rows.temperature + sequence)
    at = sequence * (rows.num_nodes + rows.num_drawn) + node
    _, _, mass = row_sums(rows, at, temperature, PIECES)
    mass /= tl.sum(mass, axis=0)
    row = sequence * rows.num_nodes + node
    for place in range(siblings):
        left = load_left(rows, trees, (row * trees.widest + place) * 2, PIECES)
        rest = tl.sum(left, axis=0)
        mass = tl.where(rest > 0, left / tl.where(rest > 0, rest, 1.0), mass)
    toss = tl.sum(uniform(seed, position, tl.arange(0, 1).to(tl.int64) + AFTER + step), axis=0)
    piece, threshold = invert(mass, toss * tl.sum(mass, axis=0), PIECES)
    share = tl.full((), 1.0, tl.float64)
    if RULE == TRAVERSAL:
        share = tl.load(trees.shares + row, mask=node > 0, other=1.0)
    _, p, _, _, _ = after_siblings(
        rows, trees, sequence, node, piece, siblings, share, RULE, WIDE, PIECE, PIECES
    )
    at, _ = invert(p.to(tl.float64), threshold, PIECE)
    return (piece * PIECE + at).to(tl.int64)


@triton.jit
def invert(mass, threshold, SIZE: tl.constexpr):
    """Return the first place where the running sum exceeds a threshold, and the threshold's rest.

    A place without mass is never returned.
    """
    at = tl.arange(0, SIZE)
    found = tl.min(tl.where((mass > 0) & (tl.cumsum(mass, axis=0) > threshold), at, SIZE), axis=0)
    last = tl.max(tl.where(mass > 0, at, 0), axis=0)  # rounding may leave a threshold above all
    found = tl.where(found < SIZE, found, last)
    return found, threshold - tl.sum(tl.where(at < found, mass, 0.0), axis=0)
