"""Steps of joint attainment over drafts as rows, part by part (Snakes and Ladders, Table 2).

A step is timed as in section 5.1 of Wu et al. 2024: the phases after drafting are the model's
forward, verification and the copy of the state, and times are means over a generation.
N drafts of K tokens are verified greedily by N + 1 rows; c tokens were verified by the last step.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from stree.batching.runners import CudaGraph
from stree.batching.step_timing import tokens_of_row
from stree.common.clock import now
from stree.models.model import HybridModel
from stree_kernels.mamba.chunk_scan import mamba_ssm_kernel
from stree_lab.benches.timing import Row, release_memory
from stree_lab.papers.draft_rows import JointRows, copy_first_row, read_with_no_ops

PHASES = ("forward", "verification", "state_copy")
Drafts = Callable[[list[int]], Sequence[Sequence[int]]]


class JointSteps:
    """Decoder of one sequence by joint attainment, with the parts that Table 2 compares.

    Row 0 reads the c tokens that the last step has verified, the others read them and a draft each.
    All begin with the state that row 0 had at the end of the last step.

    Args:
        model: A model of Mamba-2 layers.
        num_drafts: N.
        length: K.
        max_length: Tokens of the sequence, at most.
        multi_step: Whether layers scan by `multi_step_update`, not by chunks.
        just_in_time: Whether the state of row 0 is copied at the beginning of the next forward,
            inside its CUDA graph, not at the end of a step, by launches of its own.
        captured: Whether forward and verification run as CUDA graphs, one forward for each c.
    """

    def __init__(
        self, model: HybridModel, num_drafts: int, length: int, max_length: int, *,
        multi_step: bool = False, just_in_time: bool = False, captured: bool = False,
    ) -> None:
        self.model = JointRows(model, num_drafts).model  # which checks the model
        self.length, self.multi_step, self.just_in_time = length, multi_step, just_in_time
        self.cache = model.new_cache(max_length, length + 1, num_drafts + 1)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=model.device)

        self.verified, self.num_verified = zeros(length + 1), zeros(1)
        self.drafts = zeros(num_drafts, length)
        self.given = zeros(1) - 1  # drafts to accept whatever the target chooses; −1 for its choice
        numbers = range(1, length + 2)
        counts = [[c, *[c + length] * num_drafts] for c in numbers]
        self.counts = torch.tensor(counts, device=model.device)
        self.graphs: dict[int, tuple[CudaGraph, CudaGraph]] = {}
        for c in numbers if captured else ():
            forward = CudaGraph(model.device, partial(self.forward, c))
            verify = CudaGraph(model.device, partial(self.verify, forward.outputs))
            self.graphs[c] = forward, verify

    def copy_state(self) -> None:
        """Copy the state of row 0 to the other rows."""
        copy_first_row(self.cache)

    def forward(self, c: int) -> Tensor:
        """Return the logits (N, K + 1, V) of each draft's K + 1 places."""
        if self.just_in_time:
            self.copy_state()
        fed = torch.zeros(
            len(self.drafts) + 1, c + self.length, dtype=torch.long, device=self.drafts.device
        )
        fed[:, :c] = self.verified[:c]
        fed[1:, c:] = self.drafts
        hidden = read_with_no_ops(
            self.model, fed, self.counts[c - 1], self.cache, self.multi_step
        )
        return self.model.logits(hidden[1:, c - 1 :].contiguous(), wide=False)

    def verify(self, logits: Tensor) -> None:
        """Take the longest right beginning of a draft, and the target's token after it."""
        best = logits.argmax(-1)
        right = (best[:, :-1] == self.drafts).long().cumprod(1).sum(1)
        winner = right.argmax(0, keepdim=True)
        self.verified.copy_(best.index_select(0, winner)[0])
        accepted = right.index_select(0, winner)
        self.num_verified.copy_(torch.where(self.given < 0, accepted, self.given) + 1)

    def generate(
        self, prompt: Sequence[int], num_tokens: int, drafts_of: Drafts
    ) -> tuple[list[int], dict[str, list[float]]]:
        """Return num_tokens or a few more tokens, and the ms of each phase in each step.

        Args:
            prompt: At least two tokens.
            num_tokens: Tokens to generate, at least.
            drafts_of: Returns N drafts of K tokens, given the tokens so far without the prompt.
        """
        device, c = self.model.device, 1
        for row in range(len(self.counts[0])):
            self.cache.clear(row)
        self.model.prefill(torch.tensor([prompt[:-1]], device=device), self.cache.at(0))
        self.copy_state()
        self.verified[0] = prompt[-1]
        tokens: list[int] = []
        ms: dict[str, list[float]] = {phase: [] for phase in PHASES}
        while len(tokens) < num_tokens:
            self.drafts.copy_(torch.tensor(drafts_of(tokens)))
            marks = [now(device)]
            if self.graphs:
                forward, verify = self.graphs[c]
                forward.replay()
                marks.append(now(device))
                verify.replay()
            else:
                logits = self.forward(c)
                marks.append(now(device))
                self.verify(logits)
            marks.append(now(device))
            if not self.just_in_time:
                self.copy_state()
            marks.append(now(device))
            c = int(self.num_verified)
            tokens += self.verified[:c].tolist()
            for phase, (before, after) in zip(PHASES, itertools.pairwise(marks), strict=True):
                ms[phase].append(1e3 * (after - before))
        return tokens, ms


def parts_of_steps(
    target: HybridModel, context: int, num_drafts: int = 2, length: int = 6, num_tokens: int = 100,
    graphs: Sequence[bool] = (False, True),
) -> Iterator[Row]:
    """Yield the ms of each phase: a row per scan, way to copy the state, and graphs or none.

    Each is the mean over the steps of a generation, which accept 0, 1, ..., K tokens of a draft in
    turn, whatever the target chooses: all rows have the same steps. A generation warms up.
    """
    prompt = tokens_of_row(0, context, target.config.vocab_size)
    drafts = [[target.config.vocab_size - 1] * length] * num_drafts
    for captured, multi_step, just_in_time in itertools.product(
        graphs, (False, True), (False, True)
    ):
        steps = JointSteps(
            target, num_drafts, length, context + 2 * num_tokens,
            multi_step=multi_step, just_in_time=just_in_time, captured=captured,
        )
        for _ in range(2):
            turns = itertools.cycle(range(length + 1))

            def drafts_of(
                _: list[int], steps: JointSteps = steps, turns: Iterator[int] = turns
            ) -> list[list[int]]:
                steps.given.fill_(next(turns))
                return drafts

            tokens, ms = steps.generate(prompt, num_tokens, drafts_of)
        means = {f"ms_{phase}": statistics.mean(each) for phase, each in ms.items()}
        yield dict(
            what="parts", context=context, num_drafts=num_drafts, draft_tokens=length,
            scan="multi-step" if multi_step else "chunk scan",
            chunk_scan="mamba-ssm" if mamba_ssm_kernel() else "PyTorch",
            state_copy="just in time" if just_in_time else "eager", graphs=captured,
            ms_step=sum(means.values()), num_steps=len(ms["forward"]), num_tokens=len(tokens),
            **means,
        )
        del steps
        release_memory(target.device)
