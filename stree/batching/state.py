"""State of each sequence of a batch on the device: its settings, and where its next step begins.

Shapes: B rows, V vocabulary, n nodes of trees, M tokens that a step yields at most. Each tensor has
one row per sequence, so that one step serves any mixture of settings.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from stree.generation import GenerationConfig
from stree.logits.asked import NOTHING_ASKED, Asked, asked_by
from stree.logits.rules import LogitRules, Penalties
from stree.models.layer_caches import fill
from stree.trees.tree_batch import NodePaths
from stree_kernels import naive
from stree_kernels.contracts import Sampling

NUM_SETTINGS = 8  # of a row
NUM_TENSORS = 12  # first fields of a state, with a row per sequence


@dataclass
class BatchState:
    """Settings of B sequences and the tokens that their next step begins with.

    Attributes:
        active: (B,) bool; a step changes nothing of an idle row.
        temperature: (B,) fp64; 0 is greedy.
        top_k: (B,) int64; 0 keeps all tokens.
        top_p: (B,) fp64; 1 keeps all tokens.
        min_p: (B,) fp64; 0 keeps all tokens.
        repetition_penalty: (B,) fp64; 1 is none.
        presence_penalty: (B,) fp64; 0 is none.
        frequency_penalty: (B,) fp64; 0 is none.
        seed: (B,) int64.
        position: (B,) int64, position of the next tree's root in its sequence, which is the number
            of tokens committed before it.
        root: (B, 1) int64, the root's token.
        block: (B, 1 + M) int64, the number of tokens that the last step yielded, then the tokens,
            the root last.
        asked: Kinds of settings that the rows have.
        rules: Biases, penalties and barred words of the rows, and the tokens that they look at.
        settings: (8, B) int64, the settings above as `set` writes them, in one copy to the device.
    """

    active: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seed: Tensor
    position: Tensor
    root: Tensor
    block: Tensor
    asked: Asked = NOTHING_ASKED
    rules: LogitRules = field(default_factory=LogitRules)
    settings: Tensor | None = None

    @classmethod
    def new(
        cls, batch: int, longest_block: int = 1, device: torch.device | str = "cpu"
    ) -> BatchState:
        """Return `batch` idle rows for blocks of up to `longest_block` tokens."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        bits = torch.tensor(bits_of(GenerationConfig()))
        settings = bits[:, None].repeat(1, batch).to(device)
        temperature, top_p, min_p, penalty, presence, frequency = settings[:6].view(torch.float64)
        top_k, seed = settings[6:]
        return cls(
            zeros(dtype=torch.bool), temperature, top_k, top_p, min_p, penalty, presence, frequency,
            seed, zeros(dtype=torch.long), zeros(1, dtype=torch.long),
            zeros(1 + longest_block, dtype=torch.long), settings=settings,
        )

    def set(
        self, row: int, generation: GenerationConfig, prompt: Sequence[int] = (),
        vocabulary: int | None = None, eos_ids: Collection[int] = (),
    ) -> None:
        """Give a row to a request; the row is idle until its prompt has been read.

        prompt, vocabulary (its size) and eos_ids are needed for rules only (`LogitRules.begin`).
        """
        self.set_to(row, torch.tensor(bits_of(generation), device=self.active.device))
        self.rules.begin(row, self.active, generation, prompt, vocabulary, eos_ids)

    def set_to(self, row: int | Tensor, bits: Tensor) -> None:
        """Write a row's settings, a tensor (8,) on the device of what `bits_of` returns.

        row is an int, or a tensor (1,) on the device.
        """
        assert self.settings is not None, "these rows were made by hand"
        fill(self.active, row, value=False)
        self.settings[:, row] = bits if isinstance(row, int) else bits[:, None]

    def begin(
        self, row: int | Tensor, position: int | Tensor, root: int | Tensor,
        active: bool | Tensor = True,
    ) -> None:
        """Let a row decode from `root`; its caches hold `position` tokens.

        Args:
            row: The row; each argument is a tensor (1,) where only the device knows its value.
            position: Number of tokens in the caches.
            root: Token that is in no cache yet.
            active: False leaves the row idle.
        """
        self.place(row, position, root, active)
        self.rules.note(row, root)

    def place(
        self, row: int | Tensor, position: int | Tensor, root: int | Tensor,
        active: bool | Tensor = True,
    ) -> None:
        """Do as `begin`, but do not note the root for rules, so that it can be done twice."""
        self.position[row], self.root[row] = position, root
        fill(self.block[:, 0], row, value=1)
        self.block[row, 1] = root
        self.active[row] = active

    def narrow(self, first: int, count: int, generations: Iterable[GenerationConfig]) -> BatchState:
        """Return views of `count` rows from `first` on.

        generations are the settings of the active rows among them.
        """

        def view(tensor: Tensor) -> Tensor:
            return tensor if len(tensor) == count else tensor.narrow(0, first, count)

        settings = None if self.settings is None else self.settings.narrow(1, first, count)
        asked = self.asked_by(generations)
        return self._each(view, asked, self.rules.part(view), settings)

    def asked_by(self, generations: Iterable[GenerationConfig]) -> Asked:
        """Return the kinds of settings that rows with such requests have now."""
        return asked_by(generations, self.rules.size)

    def at(self, row: Tensor, asked: Asked) -> BatchState:
        """Return a copy of one row, given as a tensor (1,) int64 on the device."""
        rules = self.rules.at(row, asked)
        return self._each(lambda tensor: tensor.index_select(0, row), asked, rules)

    def _each(
        self, part: Callable[[Tensor], Tensor], asked: Asked, rules: LogitRules,
        settings: Tensor | None = None,
    ) -> BatchState:
        """Return the state with a part of each tensor."""
        names = [each.name for each in fields(self)]
        parts: dict[str, Any] = {name: part(getattr(self, name)) for name in names[:NUM_TENSORS]}
        return replace(self, **parts, asked=asked, rules=rules, settings=settings)

    @property
    def sampling(self) -> Sampling | None:
        """Temperature, seed and position by which tokens are drawn; None if all rows are greedy."""
        if not self.asked.sampled:
            return None
        return Sampling(self.temperature, self.seed, self.position)

    @property
    def leaves_out(self) -> bool:
        """True if `processed` changes logits of any row."""
        return self.asked.filtered or self.asked.has_rules

    def remember(self) -> None:
        """Note the tokens of the last step's blocks if any row has rules that look at them."""
        if self.asked.reads_paths:
            count = torch.where(self.active, self.block[:, 0], 0)[:, None]
            self.rules.remember(self.block[:, 1:], count, self.asked)

    def processed(
        self, logits: Tensor, paths: NodePaths | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Apply the rows' rules (`LogitRules`), then top-k, top-p and min-p, to logits.

        Tokens that are left out get −∞. As in `transformers`, ties with the k-th best token stay,
        top-p keeps the smallest set whose probability at the row's temperature reaches it, and
        min-p keeps tokens with at least that share of the best one's probability.

        Args:
            logits: (B, …, V).
            paths: The drafts above each node of logits (B, n, V); None if all are roots.
            ids: (V,) ascending, the tokens that the logits are of; None for all.
        """
        if self.asked.has_rules:
            penalties = Penalties(
                self.repetition_penalty, self.presence_penalty, self.frequency_penalty
            )
            logits = self.rules.apply(
                logits, self.asked, penalties, self.position, self.active, paths, ids
            )
        if not self.asked.filtered:
            return logits
        rows = [-1] + [1] * (logits.dim() - 1)
        temperature, min_p = self.temperature.view(rows), self.min_p.view(rows)
        scores = logits.double() / torch.where(temperature == 0, 1.0, temperature)
        dropped = scores < scores.amax(-1, keepdim=True) + min_p.log()
        if self.asked.ranked:
            dropped = dropped | _beyond(scores, self.top_k.view(rows), self.top_p.view(rows))
        return logits.masked_fill(dropped & (temperature > 0), -torch.inf)

    def distribution(self, logits: Tensor) -> Tensor:
        """Return each row's fp64 probabilities at its temperature; 0 puts all on the best token.

        logits (B, …, V) are the result of `processed`.
        """
        return naive.distribution(logits, self.temperature)


def bits_of(generation: GenerationConfig) -> list[int]:
    """Return a row's eight settings as they are stored in `BatchState.settings`."""
    of = generation
    penalties = [of.repetition_penalty, of.presence_penalty, of.frequency_penalty]
    floats = [of.temperature, of.top_p, of.min_p, *penalties]
    return [*struct.unpack("6q", struct.pack("6d", *floats)), of.top_k, of.seed or 0]


def _beyond(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return a mask of the tokens that top-k, or top-p after it, leaves out.

    One sort serves both, because the sort takes most of the time.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    vocabulary = scores.shape[-1]
    kth = vocabulary - torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    dropped = ascending < ascending.gather(-1, kth.expand(*scores.shape[:-1], 1))
    probs = ascending.masked_fill(dropped, -torch.inf).softmax(-1)
    dropped = dropped | ((probs.cumsum(-1) <= 1.0 - top_p) & (top_p < 1.0))
    dropped[..., -1] = False
    return torch.zeros_like(dropped).scatter(-1, order, dropped)
