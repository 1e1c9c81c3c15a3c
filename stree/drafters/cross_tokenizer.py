"""Drafter with another tokenizer than the target's: its drafts are handed over as text.

Mamba Drafters' cross-target drafting: the drafter continues the text in tokens of its own, and the
result is encoded in the target's tokens. It runs from the host, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stree.batching.state import BatchState
from stree.checkpoints.tokenizer import encode_text
from stree.common.errors import UsageError
from stree.drafters import Drafter, DrafterSpec, Proposal, SiblingSampling
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch

MAX_OWN_TOKENS = 4  # limit of the drafter's tokens for each of the target's


@dataclass(frozen=True)
class CrossTokenizerSpec(DrafterSpec):
    """Settings of a drafter with another tokenizer, from which any decoder makes one.

    Attributes:
        model: Drafts.
        own: The model's tokenizer.
        targets: The target's tokenizer.
    """

    model: HybridModel
    own: Any
    targets: Any

    def for_decoder(
        self, target: Any, num_rows: int, max_length: int, max_nodes: int
    ) -> CrossTokenizerDrafter:
        """Return the drafter of a decoder of `num_rows` rows."""
        vocabulary = target.config.vocab_size
        if isinstance(self.model, HybridModel):
            require_tokens_alone(self.model.config)
        return CrossTokenizerDrafter(
            self.model, self.own, self.targets, vocabulary, num_rows, MAX_OWN_TOKENS * max_length
        )


def require_tokens_alone(drafter: HybridConfig) -> None:
    """Raise `UsageError` for a drafter that reads features, which are of the target's tokens."""
    if drafter.feature_layers:
        raise UsageError(
            "a drafter of another tokenizer has tokens of its own, this one reads features of "
            "its target: take one that reads tokens alone"
        )


@dataclass
class _Text:
    """The text of a row.

    Attributes:
        tokens: The target's tokens that are certain.
        read: Text that the drafter's cache has read.
        num_read: The drafter's tokens of that text.
    """

    tokens: list[int] = field(default_factory=list)
    read: str = ""
    num_read: int = 0


class CrossTokenizerDrafter(Drafter):
    """Drafter that fills trees with greedy continuations in another tokenizer's tokens.

    There is one continuation for each of the root's children; they begin with the drafter's best
    tokens. Continuations that begin with the same tokens of the target share nodes.

    The drafter's cache has read whole words only, because the tokens of a word depend on its end.
    """

    drawn = SiblingSampling.DETERMINISTIC

    def __init__(
        self, model: HybridModel, own: Any, targets: Any, vocabulary: int, num_rows: int,
        max_length: int,
    ) -> None:
        self.model, self.own, self.targets = model, own, targets
        self.vocabulary, self.max_length = vocabulary, max_length
        self.cache = model.new_cache(max_length, 1, num_rows)
        self.cache.variant.copy_(torch.arange(num_rows))
        self.texts = [_Text() for _ in range(num_rows)]

    def clear(self, row: int) -> None:
        self.texts[row] = _Text()
        self.cache.clear(row)

    def read(self, row: int, tokens: Tensor) -> None:
        self.texts[row].tokens += tokens.tolist()

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int,
        keep_logits: bool,
    ) -> Proposal:
        tokens = rows.root.expand(-1, tree_batch.num_nodes).tolist()
        active = rows.active.tolist()
        for row, (count, *block) in enumerate(rows.block.tolist()):
            if active[row]:
                self.texts[row].tokens += block[:count]
                drafts = self._drafts(row, tree_batch.trees[row])
                _fill(tokens[row], tree_batch.trees[row], drafts)
        return Proposal(torch.tensor(tokens, device=rows.root.device))

    def _drafts(self, row: int, tree: TokenTree) -> list[list[int]]:
        """Return continuations of a row's text in the target's tokens, the best first."""
        text, state = _decoded(self.targets, self.texts[row].tokens), self.texts[row]
        if not text.startswith(state.read):  # a token completed a character, or changed a word
            self.cache.clear(row)
            state.read, state.num_read = "", 0
        certain = max(_last_word(text), len(state.read))
        new = encode_text(self.own, text[len(state.read) : certain])
        tail = encode_text(self.own, text[certain:])
        most = MAX_OWN_TOKENS * (tree.max_depth + 1)
        if not tail or state.num_read + len(new) + len(tail) + most > self.max_length:
            return []
        if new:
            self._logits(row, new)
        state.read, state.num_read = text[:certain], state.num_read + len(new)
        before = self.cache.save(row)
        logits = self._logits(row, tail)
        best = logits.topk(min(len(tree.children[0]), logits.shape[1])).indices[0].tolist()
        after = self.cache.save(row)
        drafts = []
        for token in best:
            own, found = [token], self._in_targets(tail, [token])
            while len(own) < most and len(found) <= tree.max_depth:  # the last may go on
                own.append(int(self._logits(row, own[-1:]).argmax()))
                found = self._in_targets(tail, own)
            drafts.append(found)
            self.cache.load(after, row)
        self.cache.load(before, row)
        return drafts

    def _logits(self, row: int, tokens: list[int]) -> Tensor:
        """Read tokens with the drafter, and return the logits (1, V) after them."""
        given = torch.tensor([tokens], device=self.model.device)
        return self.model.prefill(given, self.cache.at(row))

    def _in_targets(self, tail: list[int], drafted: list[int]) -> list[int]:
        """Return the draft after the last word's tokens in the target's tokens."""
        before, text = _decoded(self.own, tail), _decoded(self.own, [*tail, *drafted])
        if not text.startswith(before):
            return []
        text = text[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")  # half a character
        tokens = encode_text(self.targets, text) if text else []
        beyond = (at for at, token in enumerate(tokens) if token >= self.vocabulary)
        return tokens[: next(beyond, len(tokens))]


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _last_word(text: str) -> int:
    """Return the index of the space before the last word; 0 for none."""
    at = text.rfind(" ")
    while at > 0 and text[at - 1].isspace():
        at = text.rfind(" ", 0, at)
    return max(at, 0)


def _fill(tokens: list[int], tree: TokenTree, drafts: list[list[int]]) -> None:
    """Write continuations into a tree, one after the other, as far as it has nodes."""
    filled: dict[int, int] = {}
    for draft in drafts:
        node = 0
        for token in draft:
            children = tree.children[node]
            node = next((each for each in children if filled.get(each) == token), -1)
            if node < 0:
                node = next((each for each in children if each not in filled), -1)
            if node < 0:
                break
            filled[node] = tokens[node] = token
