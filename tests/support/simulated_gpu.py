"""Simulate a host and a GPU's stream with clocks of their own, to time what overlaps exactly.

Work is queued on the stream; the host's clock moves when the host works or waits.
"""

from __future__ import annotations

from typing import Any

from captures import Replayed


class SimulatedGPU:
    def __init__(self) -> None:
        self.now = 0.0  # s, on the host
        self.busy_until = 0.0

    def queue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self, device: Any = None) -> None:
        self.now = max(self.now, self.busy_until)

    def event(self, enable_timing: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self)

    def capture(self, seconds: list[float], capture_s: float) -> type[Replayed]:
        """Make a stand-in for `CudaGraph` whose replays queue given seconds of work.

        Args:
            seconds: work of a replay, in the order in which the graphs are captured.
            capture_s: time that the host takes to capture a graph.
        """
        gpu, left = self, iter(seconds)

        class Timed(Replayed):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                gpu.now += capture_s
                self.seconds = next(left)

            def replay(self) -> Any:
                gpu.queue(self.seconds)
                return super().replay()

        return Timed


class SimulatedEvent:
    """Stands in for `torch.cuda.Event`: it is reached when the work queued before it is done."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = max(self.gpu.now, self.gpu.busy_until)

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, later: SimulatedEvent) -> float:
        assert max(self.at, later.at) <= self.gpu.now, "CUDA: device not ready"
        return (later.at - self.at) * 1e3
