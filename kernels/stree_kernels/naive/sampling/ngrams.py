"""Drafts from a text in plain PyTorch: the twin of `sampling/ngrams.py`.

Shapes: B sequences, L places of text, N nodes, n nodes of a level, k children of each at most, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1  # a place of no token


class TreesToFill(NamedTuple):
    """Trees of fixed shapes, as drafts from a text need them.

    Attributes:
        parents: (B, N), each before its children; below 0 for the root and padding.
        children: (B, N, K), −1 after the last.
        levels: Of each level nodes (B, n), their children (B, n, k), and the place (B, n) of each
            node's parent among the nodes of the level above; −1 for none.
    """

    parents: Tensor
    children: Tensor
    levels: tuple[tuple[Tensor, Tensor, Tensor], ...]


@dataclass(frozen=True)
class MatchedTexts:
    """Texts that a step searches for continuations, and how well each place in them matches.

    Attributes:
        texts: (B, L), tokens of a corpus' excerpts and of the rows' own text.
        matches: (B, 1, L) int64, how many tokens up to each place equal those up to the root; below
            0 for places that no continuation begins after.
    """

    texts: Tensor
    matches: Tensor

    def after(self, matches: Tensor, tokens: Tensor) -> Tensor:
        """Return the matches (B, n, L) of nodes with tokens (B, n), given their parents'."""
        longer = F.pad(matches[..., :-1] + 1, (1, 0), value=1)
        return longer * (self.texts[:, None] == tokens[..., None])

    def continuations(self, matches: Tensor, count: int, barred: Tensor | None = None) -> Tensor:
        """Return `count` different tokens (B, n, count) that came next, the longest match first.

        Among equal matches the latest is first. barred (B, n, j) are tokens to leave out, V for
        none.
        """
        following = F.pad(self.texts[:, None, 1:], (0, 1), value=NOTHING).expand_as(matches)
        length = matches.shape[2]
        order = matches * length + torch.arange(length, device=matches.device)
        unwanted = following < 0
        if barred is not None:
            unwanted = unwanted | (following[..., None] == barred[:, :, None]).any(-1)
        found = []
        for _ in range(count):
            order = order.masked_fill(unwanted, NOTHING)
            best, at = order.max(-1, keepdim=True)
            token = following.gather(2, at)
            found.append(token.masked_fill(best < 0, NOTHING))
            unwanted = following == token
        if count == 1 and barred is None:
            return found[0].clamp(min=0)
        return _completed(torch.cat(found, -1), barred)


def look(
    texts: Tensor, roots: Tensor, context: int, num_excerpts: int = 0, excerpt: int = 1
) -> MatchedTexts:
    """Compare all places with each sequence's last tokens; arguments as of `draft_ngrams`."""
    base = num_excerpts * excerpt
    places = roots[:, None] - torch.arange(context, device=texts.device)
    last = texts.gather(1, places.clamp(min=base))
    last = last.masked_fill(last < 0, NOTHING - 1)  # places before a text match none
    earlier = F.pad(texts, (context - 1, 0), value=NOTHING)
    same = torch.ones_like(texts, dtype=torch.bool)
    length = torch.zeros_like(texts)
    for back in range(context):
        shifted = earlier[:, context - 1 - back :][:, : texts.shape[1]]
        same &= shifted == last[:, back : back + 1]
        length += same
    if base:
        number = torch.arange(base, device=texts.device) % excerpt
        length[:, :base].masked_fill_(number != context - 1, NOTHING)
    return MatchedTexts(texts, length[:, None])


def draft_ngrams(
    texts: Tensor, roots: Tensor, tokens: Tensor, trees: TreesToFill, context: int,
    num_excerpts: int = 0, excerpt: int = 1, places: Tensor | None = None,
    barred: Tensor | None = None,
) -> None:
    """Fill trees with what followed the longest matches of their paths, the latest of equals first.

    A node's children are different tokens. Where a text has too few, the smallest ids that are not
    taken fill up.

    Args:
        texts: (B, L) int64, −1 for no token: excerpts of a corpus, a place of no token, the text.
        roots: (B,) place of each root, with the last token of the text.
        tokens: (B, N) int64, the roots first; the others are written.
        trees: The trees.
        context: Tokens up to the root that a match may have, the root's included, at least 1.
        num_excerpts: Number of excerpts at the beginning of texts.
        excerpt: Places of each; a continuation begins after the place `context` of it alone.
        places: (B, 1, k), the root's children to write; None is all.
        barred: (B, 1, j), tokens that these children must not be; None is none.
    """
    seen, size = look(texts, roots, context, num_excerpts, excerpt), tokens.shape[1]
    matches = seen.matches
    padded = F.pad(tokens, (0, 1))  # the last column takes drafts without a node
    for depth, (nodes, children, above) in enumerate(trees.levels):
        if depth:
            matches = matches.gather(1, above[..., None].expand(-1, -1, matches.shape[2]))
            matches = seen.after(matches, padded.gather(1, nodes.clamp(min=0)))
        here = children if depth or places is None else places
        found = seen.continuations(matches, here.shape[2], None if depth else barred)
        padded.scatter_(1, here.masked_fill(here < 0, size).flatten(1), found.flatten(1))
    tokens.copy_(padded[:, :-1])


def _completed(found: Tensor, barred: Tensor | None) -> Tensor:
    """Replace NOTHING in found (…, k) by tokens that neither found nor barred (…, j) has."""
    taken = found if barred is None else torch.cat([found, barred], -1)
    tokens = torch.arange(taken.shape[-1], device=found.device)
    is_taken = (tokens[:, None] == taken[..., None, :]).any(-1)
    free = is_taken.long().argsort(dim=-1, stable=True)
    missing = found < 0
    number = (missing.cumsum(-1) - 1).clamp(min=0)
    return torch.where(missing, free.gather(-1, number), found)
