"""Rules of a batch's rows that change logits: biases, penalties, barred words, processors.

Shapes: B rows, V vocabulary, n nodes of trees, D drafts on the longest path, W barred words of a
row, L tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.generation import GenerationConfig
from stree.logits.asked import Asked
from stree.logits.processors import ProcessedText
from stree.trees.tree_batch import NodePaths
from stree_kernels import naive
from stree_kernels.index_plan import columns_of

ANY, NO_TOKEN = -1, -2  # in front of a shorter word, and before a text's first token
ALWAYS = 2**62  # a position beyond those of any sequence


class Penalties(NamedTuple):
    """Penalties of B rows, each (B,)."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass
class LogitRules:
    """Rules of B rows, and the tokens so far that they look at.

    Each tensor is made when a request first needs it.

    Attributes:
        seen: (B, V + 1) bool, the tokens of prompt and answer up to the root, for repetition
            penalties; the last slot takes what is no token.
        counts: (B, V + 1) int64, how often the answer up to the root has each token, for presence
            and frequency penalties.
        bias: (B, V) fp32, added to logits.
        words: (B, W, L) int64, barred sequences, the last token first, then ANY.
        until: (B, W) int64, the position of a token before which the word must not end after it;
            −1 for no word.
        recent: (B, L − 1) int64, the last tokens up to the root, the root first, then NO_TOKEN.
        texts: Tokens and processors of each row that has processors.
    """

    seen: Tensor | None = None
    counts: Tensor | None = None
    bias: Tensor | None = None
    words: Tensor | None = None
    until: Tensor | None = None
    recent: Tensor | None = None
    texts: dict[int, ProcessedText] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """W and L, which grow with the requests: graphs of another size are of other tensors."""
        return (0, 0) if self.words is None else (self.words.shape[1], self.words.shape[2])

    def part(self, of: Callable[[Tensor], Tensor]) -> LogitRules:
        """Return the rules with a part of each tensor, for the first rows or for a copy of one."""
        tensors = {name: each for name, each in vars(self).items() if isinstance(each, Tensor)}
        changed: dict[str, Any] = {name: of(each) for name, each in tensors.items()}
        return replace(self, **changed)

    def at(self, row: Tensor, asked: Asked) -> LogitRules:
        """Return a copy of one row, given as a tensor (1,) int64 on the device."""
        rules = self.part(lambda tensor: tensor.index_select(0, row))
        rules.texts = {0: self.texts[int(row)]} if asked.processed else {}
        return rules

    def begin(
        self, row: int, active: Tensor, generation: GenerationConfig, prompt: Sequence[int],
        vocabulary: int | None, eos_ids: Collection[int],
    ) -> None:
        """Write a request's rules into a row, and the tokens of its prompt as far as they count.

        Args:
            row: The row.
            active: (B,), from which tensors take their size and device.
            generation: Its settings.
            prompt: Its tokens.
            vocabulary: V; needed if there are rules at all.
            eos_ids: The tokens that end its answer.
        """

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(len(active), size, dtype=dtype, device=active.device)

        def on_device(values: Sequence[Any], dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=active.device)

        self.texts.pop(row, None)
        if generation.logits_processor:
            assert vocabulary is not None
            processors: Any = generation.logits_processor
            ends = frozenset(eos_ids)
            self.texts[row] = ProcessedText(processors, ends, vocabulary, list(prompt))
        if generation.repetition_penalty != 1:
            if self.seen is None:
                assert vocabulary is not None
                self.seen = zeros(vocabulary + 1, torch.bool)
            self.seen[row] = False
            self.seen[row, on_device(prompt)] = True
        if generation.counts_tokens:
            if self.counts is None:
                assert vocabulary is not None
                self.counts = zeros(vocabulary + 1, torch.long)
            self.counts[row] = 0
        if generation.logit_bias:
            if self.bias is None:
                assert vocabulary is not None
                self.bias = zeros(vocabulary, torch.float32)
            biases = dict(generation.logit_bias)
            self.bias[row] = 0
            values = on_device(list(biases.values()), torch.float32)
            self.bias[row, on_device(list(biases))] = values
        elif self.bias is not None:
            self.bias[row] = 0
        words = barred_words(generation, len(prompt), eos_ids)
        if generation.bars_words:  # no word is left of them where no token ends the answer
            lengths = [len(word) for word, _ in words] or [1]
            self._grow(active, len(lengths), max(lengths))
        if self.words is None or self.until is None or self.recent is None:
            return
        self.until[row] = -1
        if words:
            _, longest = self.size
            backwards = [[*word[::-1], *[ANY] * (longest - len(word))] for word, _ in words]
            self.words[row, : len(words)] = on_device(backwards)
            self.until[row, : len(words)] = on_device([until for _, until in words])
            last = [*prompt[::-1][: longest - 1], *[NO_TOKEN] * (longest - 1 - len(prompt))]
            self.recent[row] = on_device(last)

    def _grow(self, active: Tensor, num_words: int, length: int) -> None:
        """Make room for so many words of a row, of so many tokens, rounded up."""
        before = self.size
        wanted = [1 << (number - 1).bit_length() for number in (num_words, length)]
        size = max(wanted[0], before[0]), max(wanted[1], before[1])
        if size == before:
            return
        batch, device = len(active), active.device
        words = torch.full((batch, *size), ANY, dtype=torch.long, device=device)
        until = torch.full((batch, size[0]), -1, dtype=torch.long, device=device)
        recent = torch.full((batch, size[1] - 1), NO_TOKEN, dtype=torch.long, device=device)
        if self.words is not None and self.until is not None and self.recent is not None:
            words[:, : before[0], : before[1]] = self.words
            until[:, : before[0]] = self.until
            recent[:, : before[1] - 1] = self.recent
        self.words, self.until, self.recent = words, until, recent

    def note(self, row: int | Tensor, token: int | Tensor) -> None:
        """Note the first token of a row's answer.

        Both are ints, or tensors (1,) on the device.
        """
        if self.texts and (text := self.texts.get(int(row))):
            text.tokens.append(int(token))
        if self.seen is not None:
            self.seen[row, token] = True
        if self.counts is not None:
            self.counts[row, token] += 1
        if self.recent is not None and self.recent.shape[1]:
            self.recent[row, 1:] = self.recent[row, :-1].clone()
            self.recent[row, 0] = token

    def remember(self, tokens: Tensor, count: Tensor, asked: Asked) -> None:
        """Note the first `count` (B, 1) of each row's tokens (B, M)."""
        number = torch.arange(tokens.shape[1], device=tokens.device)
        if asked.penalised or asked.counted:
            is_new = number < count
        if asked.penalised:
            assert self.seen is not None
            self.seen.scatter_(1, torch.where(is_new, tokens, self.seen.shape[1] - 1), True)
        if asked.counted:
            assert self.counts is not None
            at = torch.where(is_new, tokens, self.counts.shape[1] - 1)
            self.counts.scatter_add_(1, at, torch.ones_like(at))
        if asked.barred is not None and self.recent is not None and self.recent.shape[1]:
            back = torch.arange(self.recent.shape[1], device=tokens.device)
            at = torch.where(back < count, count - 1 - back, tokens.shape[1] + back - count)
            self.recent.copy_(torch.cat([tokens, self.recent], 1).gather(1, at))
        if asked.processed:
            blocks = zip(tokens.tolist(), count[:, 0].tolist(), strict=True)
            for row, (block, size) in enumerate(blocks):
                if row in self.texts:
                    self.texts[row].tokens += block[:size]

    def apply(
        self, logits: Tensor, asked: Asked, penalties: Penalties, position: Tensor,
        active: Tensor, paths: NodePaths | None, ids: Tensor | None,
    ) -> Tensor:
        """Return logits with each row's biases, then penalties, without barred words, processed.

        Args:
            logits: (B, …, V); (B, n, V) with paths.
            asked: Kinds of settings that the rows have; at least one of rules.
            penalties: The rows' penalties.
            position: (B,), positions of the rows' roots.
            active: (B,) bool, rows whose logits count; all do without paths.
            paths: The drafts above each node; None if the logits are those after the roots.
            ids: (V,) ascending, the tokens that the logits are of; None for all.
        """
        logits = logits.to(naive.accumulation_dtype(logits.dtype))
        if asked.biased:
            assert self.bias is not None
            logits = logits + self._of_tokens(self.bias, logits, ids)
        if asked.penalised or asked.counted:
            logits = self._penalised(logits, asked, penalties, paths, ids)
        if asked.barred is not None:
            logits = self._barred(logits, position, paths, ids)
        if asked.processed:
            logits = self._processed(logits, active, paths, ids)
        return logits

    def _of_tokens(self, values: Tensor, logits: Tensor, ids: Tensor | None) -> Tensor:
        """Return values (B, ≥ V) of the tokens, in the shape of logits (B, …, V)."""
        size = logits.shape[-1]
        values = values[:, :size] if ids is None else values[:, ids]
        return values.view(-1, *[1] * (logits.dim() - 2), size)

    def _penalised(
        self, logits: Tensor, asked: Asked, penalties: Penalties, paths: NodePaths | None,
        ids: Tensor | None,
    ) -> Tensor:
        rows = [-1] + [1] * (logits.dim() - 1)
        repetition, presence, frequency = (each.to(logits.dtype).view(rows) for each in penalties)

        def lower(values: Tensor, seen: Tensor | None, counts: Tensor | None) -> Tensor:
            if asked.penalised:
                lowered = torch.where(values < 0, values * repetition, values / repetition)
                values = lowered if seen is None else torch.where(seen, lowered, values)
            if counts is not None:
                values = values - frequency * counts - presence * (counts > 0)
            return values

        seen = counts = None
        if asked.penalised:
            assert self.seen is not None
            seen = self._of_tokens(self.seen, logits, ids)
        if asked.counted:
            assert self.counts is not None
            counts = self._of_tokens(self.counts, logits, ids)
        result = lower(logits, seen, counts)
        if paths is None:
            return result
        drafts, size = paths.tokens, logits.shape[-1]
        if asked.counted:  # how often the answer has each draft, down to the node
            assert self.counts is not None
            counts = self.counts.gather(1, drafts.flatten(1)).view_as(drafts)
            same = drafts[..., None] == drafts[..., None, :]
            counts = counts + (same & paths.are_drafts[..., None, :]).sum(-1)
        if ids is not None:
            drafts = columns_of(drafts, ids)  # a column more, for those that the head has not
            result, logits = (F.pad(each, (0, 1)) for each in (result, logits))
        lowered = lower(logits.gather(-1, drafts), None, counts)
        return result.scatter(-1, drafts, lowered)[..., :size]

    def _barred(
        self, logits: Tensor, position: Tensor, paths: NodePaths | None, ids: Tensor | None
    ) -> Tensor:
        assert self.words is not None and self.until is not None and self.recent is not None
        shape, size = logits.shape, logits.shape[-1]
        logits = logits.flatten(1, -2) if logits.dim() > 2 else logits[:, None]  # (B, n, V)
        last, above = self.words[..., 0], self.words[:, None, :, 1:]
        before, depths = self.recent[:, None], torch.zeros_like(position)[:, None]
        if paths is not None:
            depths = paths.lengths
            before = paths.before_next(self.recent)
        is_met = ((above == before[:, :, None]) | (above == ANY)).all(-1)  # (B, n, W)
        is_met = is_met & ((position[:, None] + depths)[..., None] < self.until[:, None])
        values = torch.where(is_met, -torch.inf, torch.inf).to(logits.dtype)
        values = values.expand(-1, logits.shape[1], -1)
        last = last.clamp(min=0)
        if ids is not None:
            last, logits = columns_of(last, ids), F.pad(logits, (0, 1))
        last = last[:, None].expand_as(values)
        return logits.scatter_reduce(-1, last, values, "amin")[..., :size].reshape(shape)

    def _processed(
        self, logits: Tensor, active: Tensor, paths: NodePaths | None, ids: Tensor | None
    ) -> Tensor:
        logits = logits.clone()
        of_nodes = logits.view(len(logits), -1, logits.shape[-1])
        for row, text in self.texts.items():
            if row >= len(logits) or not (paths is None or bool(active[row])):
                continue
            drafts: list[list[int]] = [[]] * of_nodes.shape[1]
            if paths is not None:
                lengths = paths.lengths[row].tolist()
                upwards = zip(paths.tokens[row].tolist(), lengths, strict=True)
                drafts = [tokens[:length][::-1] for tokens, length in upwards]
            text.process(of_nodes[row], drafts, ids)
        return logits


def barred_words(
    generation: GenerationConfig, prompt_length: int, eos_ids: Collection[int]
) -> list[tuple[Sequence[int], int]]:
    """Return a request's barred words, each with the position before which it is barred.

    As in `transformers`, a bad word that only is a token which ends the answer is left out.
    """
    words: list[tuple[Sequence[int], int]]
    words = [(word, ALWAYS) for word in generation.bad_words_ids]
    words = [each for each in words if len(each[0]) > 1 or each[0][0] not in eos_ids]
    if generation.min_new_tokens:
        until = prompt_length - 1 + generation.min_new_tokens
        words += [((token,), until) for token in sorted(eos_ids)]
    return words
