"""Draft with known distributions, into trees whose shapes the drafter chooses."""

from __future__ import annotations

import torch
from toys import TableDrafter, drawing_in_turn

from stree.drafters import Proposal
from stree_kernels import ops


class Growing(TableDrafter):
    """Grows trees with the product's own ops, from a table over the last two tokens."""

    grows = True

    def draft(self, rows, tree_batch, longest_block, bound, keep_logits) -> Proposal:
        self.read_blocks(rows)
        paths = [{0: []} for _ in rows.active]  # of the pool's nodes, by row
        tree_batch.pool[:, 0] = rows.block.gather(1, rows.block[:, :1])[:, 0]
        finite = torch.ones(len(rows.active), tree_batch.num_drawn_from, dtype=torch.bool)
        logits, done = [], 0
        for number, level in enumerate(tree_batch.levels):
            if number:
                tree_batch.grow(number)
            after = torch.stack([
                torch.stack([
                    self.table[tuple(([0, 0, *self.sequences[row]] + paths[row][node])[-2:])]
                    for node in nodes
                ])
                for row, nodes in enumerate(level.nodes.tolist())
            ])
            above = tree_batch.paths_at(tree_batch.pool, number, rows.asked.reads_paths)
            logits.append(rows.processed(after, above))
            count = level.nodes.shape[1]
            self.choose(tree_batch, rows, level, logits[-1], finite[:, done : done + count])
            done += count
            for row, nodes in enumerate(level.nodes.tolist()):
                for node, places in zip(nodes, level.places[row].tolist(), strict=True):
                    for place in places:
                        paths[row][place] = [*paths[row][node], int(tree_batch.pool[row, place])]
        self.logits = torch.cat(logits, 1)
        return Proposal(tree_batch.finish(tree_batch.pool), finite)

    def choose(self, tree_batch, rows, level, logits, finite) -> None:
        ops.choose_children(
            logits, level.depths, rows.sampling, level.places, tree_batch.pool, finite, level.nodes,
            tree_batch.values, None, tree_batch.slots_at(rows.temperature),
        )


class GrowingInTurn(Growing):
    """Draws siblings without replacement, by choices that a test can enumerate."""

    def __init__(self, table, choose) -> None:
        super().__init__(table)
        self.draw = drawing_in_turn(choose)

    def choose(self, tree_batch, rows, level, logits, finite) -> None:
        slots = tree_batch.slots_at(rows.temperature)
        self.draw(
            logits, level.depths, rows.sampling, level.places, tree_batch.pool, finite, level.nodes,
            tree_batch.values, slots=slots,
        )


class Telling(GrowingInTurn):
    """Returns the logits that it drew from with each proposal."""

    def draft(self, *given) -> Proposal:
        proposal = super().draft(*given)
        return Proposal(proposal.tokens, proposal.finite, self.logits)
