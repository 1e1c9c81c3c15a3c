"""N-gram drafter: draft without a model, by looking up earlier places of the same last tokens.

Prompt lookup, as Snakes and Ladders' PNG drafts: several continuations of the text so far, and of a
corpus if there is one, are merged into one prefix tree. Shapes: B rows, N nodes, n nodes of a
level, K children of each at most, L places of text, E excerpts of a corpus, X tokens of each, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.batching.prefillers import Prefiller
from stree.batching.state import BatchState
from stree.drafters import NGRAM_CONTEXT, Drafter, DrafterSpec, Proposal, SiblingSampling
from stree.drafters.model import ModelDrafter
from stree.engine.row_store import RowStore, SavedRow
from stree.generation import require_whole
from stree.models.layer_caches import Which, fill
from stree.models.model import HybridModel
from stree.trees.tree_batch import TreeBatch
from stree_kernels import ops
from stree_kernels.naive.sampling.ngrams import NOTHING, MatchedTexts, TreesToFill, look

NUM_PLACES = 16  # places of a corpus that a step looks at, for each number of matching tokens
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token's part of a key is lost


@dataclass(frozen=True)
class NGram(DrafterSpec):
    """Settings of an n-gram drafter, from which any decoder makes one.

    Attributes:
        context: Number of last tokens by which places of the text are compared, at least 1.
        corpus: Tokens of a text to draft from, in addition to the sequence's own; () for none.
        model: A drafter for the rest of the tree: the n-grams then fill only the root's last child
            and all below it. None lets n-grams fill the whole tree.
        siblings: How the model draws siblings, as in `ModelDrafterSpec`.
        temperature: Temperature at which the model draws, as in `ModelDrafterSpec`.

    Raises `UsageError` for a context that is no whole number of at least 1.
    """

    context: int = NGRAM_CONTEXT
    corpus: Sequence[int] = ()
    model: HybridModel | None = None
    siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT
    temperature: float | None = None

    def __post_init__(self) -> None:
        require_whole("context", self.context)

    @property
    def partner(self) -> HybridModel | None:
        return self.model

    def for_decoder(
        self, target: Any, num_rows: int, max_length: int, max_nodes: int
    ) -> NGramDrafter | GraftingDrafter:
        """Return the drafter of a decoder of `num_rows` rows."""
        text = RowTexts(
            self.context, torch.as_tensor(self.corpus, dtype=torch.long), num_rows, max_length,
            target.config.vocab_size, target.device,
        )
        if self.model is None:
            return NGramDrafter(text)
        return GraftingDrafter(
            self.model, text, num_rows, max_length, max_nodes, self.siblings, self.temperature
        )


class Corpus:
    """Index of a text, whose places are sorted by the tokens before them.

    A step looks at the last NUM_PLACES places for each number of matching tokens. The index of
    tokens (T,) takes 12 bytes a token for each token of context.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context
        powers = [pow(MULTIPLIER, power + 1, 2**64) for power in range(context)]
        signed = [each - 2**64 if each >= 2**63 else each for each in powers]
        self._powers = torch.tensor(signed, device=tokens.device)
        padded = F.pad(tokens, (context - 1, 0), value=NOTHING)
        ends = padded.unfold(0, context, 1).flip(1)  # (T, context), the last token first
        keys, places = self._keys(ends).T.contiguous().sort(dim=1, stable=True)
        self._keys_in_order, self._places = keys, places.int()

    def excerpts(self, last: Tensor, reach: int) -> Tensor:
        """Return excerpts (B, E, X) of the places that match last (B, context), in text order.

        last has the last token first. An excerpt has `context` tokens up to its place and `reach`
        after it; places without a token, and those at its end, hold NOTHING.
        """
        places = self._places_after(last).sort(dim=1).values
        around = torch.arange(1 - self.context, reach + 2, device=last.device)
        at = places[..., None] + around
        inside = (places[..., None] >= 0) & (at >= 0) & (at < len(self.tokens)) & (around <= reach)
        tokens = self.tokens[at.clamp(0, len(self.tokens) - 1)]
        return tokens.masked_fill(~inside, NOTHING)

    def _places_after(self, last: Tensor) -> Tensor:
        """Return matching places (B, E), −1 for none; the last places if nothing matches."""
        back = torch.arange(NUM_PLACES, device=last.device)
        keys = self._keys(last).T.contiguous()  # (context, B)
        first, end = (
            torch.searchsorted(self._keys_in_order, keys, right=right) for right in (False, True)
        )
        at = end[..., None] - 1 - back
        flat = at.clamp(min=0).flatten(1)
        found = self._places.gather(1, flat).view_as(at).masked_fill(at < first[..., None], NOTHING)
        latest = (len(self.tokens) - 1 - back).clamp(min=NOTHING).expand(len(last), -1)
        return torch.cat([found.transpose(0, 1).flatten(1), latest], 1)

    def _keys(self, ends: Tensor) -> Tensor:
        """Hash the first 1, 2, … tokens of ends (N, context), the last tokens first.

        A collision costs a draft at most.
        """
        return ((ends + 3) * self._powers).cumsum(1)


class RowTexts:
    """The certain text of each row, and the search for continuations in it and in a corpus.

    All tensors are static, so that steps which draft from it can be captured.
    """

    def __init__(
        self, context: int, corpus: Tensor, num_rows: int, max_length: int, vocabulary: int,
        device: torch.device,
    ) -> None:
        self.context, self.vocabulary = context, vocabulary
        self.corpus = Corpus(corpus.to(device), context) if len(corpus) else None
        # Nothing stands before a text; the last place takes what idle rows write
        self.start, shape = 1, (num_rows, 1 + max_length + 1)
        self.texts = torch.full(shape, NOTHING, dtype=torch.long, device=device)
        self.num_read = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._back = torch.arange(context, device=device)

    def clear(self, row: Which) -> None:
        fill(self.texts[:, self.start :], row, value=NOTHING)
        fill(self.num_read, row)

    def save(self, row: int, most: int) -> SavedRow:
        """Return copies of a row's text."""
        texts = self.texts[row, self.start : self.start + most].clone()
        return SavedRow(self.num_read[row].clone(), (texts,))

    def load(self, saved: SavedRow, row: int) -> None:
        """Write the copies of `save` into a row."""
        (texts,) = saved.parts
        self.texts[row, self.start : self.start + len(texts)] = texts
        self.num_read[row].copy_(saved.length)

    def bytes_per_row(self) -> int:
        """Return the bytes that a row takes."""
        return self.texts[0].nbytes + self.num_read[0].nbytes

    def read(self, row: int, tokens: Tensor) -> None:
        places = torch.arange(len(tokens), device=self.texts.device)
        places += self.start + self.num_read[row]
        self.texts[row].index_copy_(0, places, tokens.to(self.texts))
        self.num_read[row] += len(tokens)

    def take(self, rows: BatchState, longest_block: int) -> None:
        """Read the rows' blocks, their roots included."""
        texts, block = self.texts[: len(rows.active)], rows.block[:, : 1 + longest_block]
        count = torch.where(rows.active, block[:, 0], 0)[:, None]
        at = torch.arange(longest_block, device=texts.device)
        places = self.start + rows.position[:, None] - count + 1 + at
        texts.scatter_(1, torch.where(at < count, places, texts.shape[1] - 1), block[:, 1:])
        num_read = self.num_read[: len(rows.active)]
        torch.where(rows.active, rows.position + 1, num_read, out=num_read)

    def roots(self, rows: BatchState) -> Tensor:
        """Return the tokens (B, 1) of the rows' roots; any tokens in idle rows."""
        place = (self.start + rows.position[:, None]).clamp(min=self.start - 1)
        return self.texts[: len(rows.active)].gather(1, place).clamp(min=0)

    def look(self, rows: BatchState, reach: int) -> MatchedTexts:
        """Compare all places with each row's last tokens, for trees of depth `reach`."""
        return look(*self._texts(rows, reach))

    def _texts(self, rows: BatchState, reach: int) -> tuple[Tensor, Tensor, int, int, int]:
        """Return texts, roots, context, and number and length of excerpts as `look` takes them."""
        texts = self.texts[: len(rows.active), :-1]
        roots = (self.start + rows.position).clamp(min=self.start - 1)
        if self.corpus is None:
            return texts, roots, self.context, 0, 1
        places = self.start + rows.position[:, None] - self._back
        last = texts.gather(1, places.clamp(min=self.start - 1))
        last = last.masked_fill(last < 0, NOTHING - 1)  # places before a text match none
        excerpts = self.corpus.excerpts(last, reach)
        number, length = excerpts.shape[1:]
        texts = torch.cat([excerpts.flatten(1), texts], 1)
        return texts, roots + number * length, self.context, number, length

    def fill(
        self, rows: BatchState, tree_batch: TreeBatch, tokens: Tensor, places: Tensor | None = None,
        barred: Tensor | None = None,
    ) -> None:
        """Write drafts into tokens (B, N), which hold the roots.

        Args:
            rows: State of the rows.
            tree_batch: The trees.
            tokens: (B, N), written.
            places: (B, 1, k), the root's children to write; None is all.
            barred: (B, 1, j), tokens that these children must not be; None is none.
        """
        trees = TreesToFill(
            tree_batch.parents, tree_batch.children,
            tuple((level.nodes, level.places, level.above) for level in tree_batch.levels),
        )
        texts, roots, context, count, length = self._texts(rows, tree_batch.max_depth)
        ops.draft_ngrams(
            texts, roots, tokens, trees, context, count, length, places, barred
        )


class NGramDrafter(Drafter):
    """Drafter that fills trees with continuations found in the text."""

    drawn = SiblingSampling.DETERMINISTIC
    capturable = True

    def __init__(self, text: RowTexts) -> None:
        self.text = text

    @property
    def row_store(self) -> RowStore:
        return self.text

    def clear(self, row: Which) -> None:
        self.text.clear(row)

    def read(self, row: int, tokens: Tensor) -> None:
        self.text.read(row, tokens)

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int,
        keep_logits: bool,
    ) -> Proposal:
        self.text.take(rows, longest_block)
        tokens = F.pad(self.text.roots(rows), (0, tree_batch.num_nodes - 1))
        self.text.fill(rows, tree_batch, tokens)
        return Proposal(tokens)


class GraftingDrafter(ModelDrafter):
    """Model drafter whose trees have n-grams grafted on.

    The root's last child and all below it are a continuation found in the text, which begins with
    another token than the model's children. If the root has one child only, the whole tree is the
    model's.
    """

    reads_alongside = False  # the text reads the tokens, too

    def __init__(
        self, model: HybridModel, text: RowTexts, num_rows: int, max_length: int, max_nodes: int,
        siblings: SiblingSampling = SiblingSampling.WITHOUT_REPLACEMENT,
        temperature: float | None = None,
    ) -> None:
        super().__init__(model, num_rows, max_length, max_nodes, siblings, temperature)
        self.text, self.grows = text, False
        if siblings is not SiblingSampling.DETERMINISTIC:
            self.drawn = SiblingSampling.MIXED

    def clear(self, row: Which) -> None:
        super().clear(row)
        self.text.clear(row)

    def save(self, row: int, most: int) -> SavedRow:
        saved = super().save(row, most)
        return SavedRow(saved.length, (*saved.parts, self.text.save(row, most)))

    def load(self, saved: SavedRow, row: int) -> None:
        super().load(saved, row)
        self.text.load(saved.parts[-1], row)

    def bytes_per_row(self) -> int:
        return super().bytes_per_row() + self.text.bytes_per_row()

    def read(self, row: int, tokens: Tensor, *features_and_reader: Any) -> None:
        super().read(row, tokens, *features_and_reader)
        self.text.read(row, tokens)

    def read_by(
        self, prefiller: Prefiller, row: int, tokens: Tensor, features: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        if start == 0 and self.skips_first:  # the text has this token all the same
            self.text.read(row, tokens[:1])
        super().read_by(prefiller, row, tokens, features, start)

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int,
        keep_logits: bool,
    ) -> Proposal:
        proposal = super().draft(rows, tree_batch, longest_block, bound, keep_logits)
        tokens, places = proposal.tokens, tree_batch.levels[0].places  # (B, N), (B, 1, K)
        self.text.take(rows, longest_block)
        number = torch.arange(places.shape[2], device=tokens.device)
        last = (places >= 0).sum(-1, keepdim=True) - 1
        place = torch.where(last > 0, places.gather(2, last.clamp(min=0)), NOTHING)
        drawn = tokens.gather(1, places[:, 0].clamp(min=0))[:, None]
        barred = torch.where(number < last, drawn, self.text.vocabulary)
        drafts = tokens.clone()
        self.text.fill(rows, tree_batch, drafts, place, barred)
        points = torch.arange(tree_batch.num_nodes, device=tokens.device) == place[:, 0]
        parents = tree_batch.parents.clamp(min=0)
        for _ in range(tree_batch.max_depth - 1):
            points = points | points.gather(1, parents)
        tokens = torch.where(points, drafts, tokens)
        if proposal.points is not None:
            points = points | proposal.points
        everywhere = self.siblings is SiblingSampling.DETERMINISTIC
        return replace(proposal, tokens=tokens, points=None if everywhere else points)
