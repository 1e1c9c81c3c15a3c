"""Runners of steps: eager PyTorch, or CUDA graphs. Graphs of prompts are in `prefillers.py`.

Graphs of a step are captured once for each combination of number of rows, shape of the trees, the
longest block, kinds of settings (`Asked`), and cache slots to attend to, rounded up. The contents
of rows and trees may differ from replay to replay.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stree.batching.prefillers import ChunkedPrefill, Prefiller, PromptCall
from stree.batching.state import BatchState
from stree.batching.step import Step, StepInputs
from stree.common.host_copy import AsyncHostCopy, HostCopy
from stree.common.lru import LRUCache
from stree.models.model import HybridModel
from stree.models.packing import Places, weights_state
from stree.trees.tree_batch import TreeBatch
from stree_kernels import ops

MAX_KEPT = 64  # step graphs, two graphs each; a tree may need two for each number of rows
Mark = Callable[[str], None]


def runner_of(step: Step) -> EagerRunner | GraphRunner:
    """Return a `GraphRunner` if target and drafter can be captured, else an `EagerRunner`."""
    drafter = step.drafter
    capturable = drafter is None or drafter.capturable
    return GraphRunner(step) if capturable and _on_gpu(step) else EagerRunner(step)


def _on_gpu(step: Step) -> bool:
    return isinstance(step.target, HybridModel) and step.target.device.type == "cuda"


class EagerRunner:
    """Run each step's operations one by one: on a CPU, and for what graphs cannot capture.

    That is a drafter that works on the host, or a target that is no `HybridModel`.
    """

    num_in_flight = 1  # steps that are launched before the report of the first is read
    rounds_rows = False  # whether a step has a power of two of rows
    hand_over = HostCopy  # copies values to the host

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reports: deque[Tensor] = deque()
        self.prefiller = ChunkedPrefill(PromptCall) if _on_gpu(step) else Prefiller()
        self.done: set[Hashable] = set()
        self.weights = Weights(step)

    @torch.inference_mode()  # on a CPU a sixth faster than no_grad: most of its steps is overhead
    def launch(self, inputs: StepInputs, mark: Mark) -> None:
        """Start a step; `mark` is called with the name of each phase that ends."""
        self.reports.append(run_eagerly(self.step, inputs, mark))

    def prepare(self, inputs: StepInputs) -> None:
        """Do nothing: there are no graphs to capture."""

    def collect(self) -> list[list[Any]]:
        """Return what the oldest step not yet collected reports to the host (`Step.verify`)."""
        return self.reports.popleft().tolist()

    def drop(self, newest: bool = False) -> None:
        """Forget the oldest report, or the newest, without waiting for it."""
        self.reports.pop() if newest else self.reports.popleft()

    def run(self, key: Hashable, task: Callable[[], Tensor | None]) -> Tensor | None:
        """Run a task of a request between steps, and return its result.

        Args:
            key: Names the task; two tasks with the same key are the same function.
            task: A function over tensors at fixed addresses, which must not wait for the device
                and may be called twice.
        """
        self.done.add(key)
        return task()

    def is_ready(self, key: Hashable) -> bool:
        """Return whether `run` with that key starts at once, with no kernel or graph to make."""
        return key in self.done

    def follow_weights(self) -> bool:
        """Return True when weights were changed or moved since the last call."""
        return bool(self.weights.follow())


def run_eagerly(step: Step, inputs: StepInputs, mark: Mark) -> Tensor:
    """Run a step's operations one by one, and return its report on the device."""
    rows, tree_batch, longest_block = inputs.rows, inputs.tree_batch.own(), inputs.longest_block
    bound = inputs.position + tree_batch.num_nodes
    longest_path: int | None = longest_block
    if rows.block.device.type == "cpu":  # reading the counts does not wait for a device
        counts = zip(rows.active.tolist(), rows.block[:, 0].tolist(), strict=True)
        longest_block = max([1, *(count for active, count in counts if active)])
        longest_path = None
    mark("host")
    proposal = step.draft(rows, tree_batch, longest_block, bound)
    mark("draft")
    report = new_report(rows, tree_batch)
    return step.verify(rows, tree_batch, proposal, bound, report, mark, longest_path)


class GraphRunner:
    """Run each step as two CUDA graphs, the draft and the rest, without the host in between.

    Tokens, accepted paths and all lengths stay on the device; the host reads a report of each step
    while the next one runs. A step with a row whose logits the host processes runs eagerly.
    """

    num_in_flight = 2
    rounds_rows = True  # so that few graphs serve any number
    hand_over = AsyncHostCopy

    def __init__(self, step: Step) -> None:
        self.step = step
        self.bucket = ops.bucket(step.cache.num_slots, step.target.device, step.target.dtype)
        self.step_graphs: LRUCache[Any, StepGraphs] = LRUCache(MAX_KEPT)
        self.captured: set[Any] = set()  # keys of all that were, dropped ones included
        self.has_warned = False
        self.launched: deque[tuple[Tensor, Any]] = deque()
        self.weights = Weights(step)
        self.prefiller = ChunkedPrefill(CudaGraph)
        self.tasks: dict[Hashable, CudaGraph] = {}

    def launch(self, inputs: StepInputs, mark: Mark) -> None:
        """Start a step as `EagerRunner.launch` does; its report is copied to the host meanwhile."""
        graphs = self.prepare(inputs)
        if graphs is not None:
            self.launched.append(graphs.replay(inputs.tree_batch, mark))
            return
        report, arrived = run_eagerly(self.step, inputs, mark), torch.cuda.Event()
        arrived.record()
        self.launched.append((report, arrived))

    def prepare(self, inputs: StepInputs) -> StepGraphs | None:
        """Return the graphs of steps with inputs of these shapes; the first call captures them.

        Returns None for steps that run eagerly.
        """
        if inputs.rows.asked.processed:
            return None
        rows, tree_batch = inputs.rows, inputs.tree_batch
        longest_block = max(inputs.longest_block, tree_batch.max_depth + 1)
        num_used, num_slots = inputs.position + tree_batch.num_nodes, self.step.cache.num_slots
        bound = min(-(-num_used // self.bucket) * self.bucket, num_slots)
        key = (len(rows.active), tree_batch.shape, longest_block, rows.asked, bound)
        if key not in self.step_graphs:
            self._warn_of_more(key)
            self.step_graphs[key] = StepGraphs(self.step, rows, tree_batch, longest_block, bound)
        return self.step_graphs[key]

    def _warn_of_more(self, key: Any) -> None:
        """Warn once when graphs that were dropped must be captured again, which takes long."""
        if key in self.captured and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"steps of this decoder take more shapes than the {MAX_KEPT} whose CUDA graphs are "
                "kept, so graphs are dropped and captured again while it decodes: "
                "choose among fewer trees, take fewer rows, or give requests with and without "
                "sampling, top-k, top-p, min-p, a penalty or logprobs decoders of their own",
                stacklevel=2,
            )
        self.captured.add(key)

    def collect(self) -> list[list[Any]]:
        """Wait for the report of the oldest step not yet collected, and return it."""
        report, arrived = self.launched.popleft()
        arrived.synchronize()
        return report.tolist()

    def drop(self, newest: bool = False) -> None:
        """Forget the oldest report, or the newest, without waiting for it."""
        self.launched.pop() if newest else self.launched.popleft()

    def run(self, key: Hashable, task: Callable[[], Tensor | None]) -> Tensor | None:
        """Run a task as `EagerRunner.run` does; the first call with a key captures it.

        The next run with the same key overwrites the result.
        """
        if key not in self.tasks:
            self.tasks[key] = CudaGraph(self.step.cache.device, task)
        return self.tasks[key].replay()

    def is_ready(self, key: Hashable) -> bool:
        """Return whether the task with that key is captured."""
        return key in self.tasks

    def follow_weights(self) -> bool:
        """Follow weights as `EagerRunner` does, and drop the graphs of weights that have moved.

        Graphs hold the addresses of weights.
        """
        change = self.weights.follow()
        if change == "moved":
            self.step_graphs.clear()
            self.prefiller.graphs.clear()
            self.tasks.clear()
            self.captured.clear()
        return bool(change)


class Weights:
    """Places and versions of the weights of a step's models at the last call of `follow`."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._seen = self._now()

    def follow(self) -> str:
        """Return "moved" or "changed" (in place) when weights were since the last call, else "".

        The models are packed again: what moved, and an 8-bit head.
        """
        now = self._now()
        if now == self._seen:
            return ""
        moved = [places for places, _ in now] != [places for places, _ in self._seen]
        for model in self._models():
            if isinstance(model, HybridModel):
                model.pack()  # now, or the next call would move weights again
        self._seen = self._now()
        return "moved" if moved else "changed"

    def _now(self) -> list[tuple[Places, list[int]]]:
        return list(map(weights_state, self._models()))

    def _models(self) -> list[nn.Module]:
        drafter = self.step.drafter
        models = self.step.target, None if drafter is None else drafter.model
        return [each for each in models if isinstance(each, nn.Module)]  # others have no weights


class StepGraphs:
    """Graphs of a step with a fixed number of rows and shape of the trees.

    They are rehearsed and captured while all rows are idle. Such a step only replays the accepted
    paths that are pending, as the next step would.
    """

    def __init__(
        self, step: Step, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int
    ) -> None:
        self.tree_batch = tree_batch.static()
        device = rows.active.device
        report = new_report(rows, tree_batch)
        self.arrived = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0
        active = rows.active.clone()
        rows.active.zero_()
        self.draft: CudaGraph | None = None
        if step.drafts(tree_batch):
            self.draft = CudaGraph(
                device, lambda: step.draft(rows, self.tree_batch, longest_block, bound)
            )
            proposal = self.draft.outputs
        else:
            proposal = step.draft(rows, self.tree_batch, longest_block, bound)
        self.rest = CudaGraph(
            device,
            lambda: step.verify(
                rows, self.tree_batch, proposal, bound, report, longest_path=longest_block
            ),
        )
        rows.active.copy_(active)
        shape, dtype = self.rest.outputs.shape, self.rest.outputs.dtype
        self.pinned = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(2)]

    def replay(self, tree_batch: TreeBatch, mark: Mark) -> tuple[Tensor, Any]:
        """Start a step; return the pinned buffer of its report, and the event of its arrival.

        The phase "verify" includes acceptance here, which is in the same graph.
        """
        mark("host")  # a device without work waits until here
        self.tree_batch.hold(tree_batch)
        if self.draft is not None:
            self.draft.replay()
        mark("draft")
        self.rest.replay()
        mark("verify")
        self.turn = 1 - self.turn
        self.pinned[self.turn].copy_(self.rest.outputs, non_blocking=True)
        self.arrived[self.turn].record()
        mark("accept")
        return self.pinned[self.turn], self.arrived[self.turn]


class CudaGraph:
    """A function of static tensors, captured once and replayed without host work.

    The function runs twice before the capture, so that libraries and lazy constants are ready. The
    graph shares the memory pool of the graph `beside`, if one is given: the two must not run at the
    same time, and a replay of either may overwrite the other's outputs.
    """

    def __init__(
        self, device: torch.device, function: Callable[[], Any], beside: CudaGraph | None = None
    ) -> None:
        with ops.current(device), no_garbage_collected():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function()
                function()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            # PyTorch's own stream for captures is of the GPU that was current at the first one
            pool = None if beside is None else beside.graph.pool()
            with torch.cuda.graph(self.graph, pool=pool, stream=stream):
                self.outputs = function()

    def replay(self) -> Any:
        """Replay the graph; return the static outputs, which the next replay overwrites."""
        self.graph.replay()
        return self.outputs


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Keep Python from collecting garbage during a capture.

    The collection might destroy a graph of a decoder that is gone, and the capture would fail.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def new_report(rows: BatchState, tree_batch: TreeBatch) -> Tensor:
    """Return a report (B, 3 + 2·M) of zeros for a step."""
    shape = (len(rows.active), 3 + 2 * (tree_batch.max_depth + 1))
    return torch.zeros(shape, dtype=torch.long, device=rows.active.device)
