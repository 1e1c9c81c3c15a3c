"""A model drafter whose drafts are noted."""

from stree.drafters.model import ModelDrafter


def watch(*arguments):
    """Return a drafter that notes each draft: its row, position, tree, tokens and logits."""
    drafter = ModelDrafter(*arguments)
    drafter.drafts, draft = [], drafter.draft

    def watched(rows, tree_batch, longest_block, bound, keep_logits):
        proposal = draft(rows, tree_batch, longest_block, bound, True)
        for row in rows.active.nonzero()[:, 0].tolist():
            at, drawn_by = int(rows.position[row]), tree_batch.drawn_by[row].tolist()
            drafter.drafts.append(
                (row, at, tree_batch.trees[row], proposal.tokens[row].tolist(), drawn_by,
                 proposal.logits[row])
            )
        return proposal

    drafter.draft = watched
    return drafter
