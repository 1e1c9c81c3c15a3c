"""Time requests in the rows of a batched decoder, each by its share of the batch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.engine.sequence import StepOutput
from stree.generation import GenerationOutput


@dataclass
class Share:
    """A request's share of its batch's time and calls.

    A step's wall time in which n rows were decoded counts 1/n for each, so that the seconds of all
    requests add up to the wall time of the steps, and tokens by seconds are the batch's throughput.
    With one row the share is all of it.

    Attributes:
        prefill_s: of admission, of the time that steps spent on prompts, and of keeping the prefix
            of the next turn.
        decode_s: of the time that steps spent on decoding.
        num_calls: of the target's calls; the number of calls that decoded the request, divided by
            it, is the mean number of rows in the batch.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_calls: float = 0.0


class TimedRows:
    """A `BatchDecoder` under a clock: `admit`, `step` and `release` are the decoder's.

    Attributes:
        shares: By row, of its request or the last that it had.
    """

    def __init__(self, decoder: BatchDecoder) -> None:
        self.decoder = decoder
        self.shares: dict[int, Share] = {}
        self._reading: set[int] = set()  # rows without a token yet
        self._read_s = 0.0  # spent on prompts, and not yet added to a share
        self._waited_s = 0.0  # for a step in flight, between steps

    @property
    def num_free_rows(self) -> int:
        return self.decoder.num_free_rows

    def admit(self, request: Request) -> int:
        started = time.perf_counter()
        row = self.decoder.admit(request)
        admitted = time.perf_counter()
        self.shares[row] = Share(prefill_s=admitted - started)
        # Waits for the step in flight, for the last turn's prefix; that time is the other rows'
        self.decoder.await_prefixes()
        self._waited_s += time.perf_counter() - admitted
        self.decoder.prepare_prefill(row)  # counts for no request, like all captures of graphs
        self._reading.add(row)
        return row

    def step(self) -> list[StepOutput]:
        reading, read_before = set(self._reading), self.decoder.worker.prefill_time.seconds
        started = time.perf_counter()
        reports = self.decoder.step()
        step_s = time.perf_counter() - started + self._waited_s
        # A device may have read while the steps before waited for others
        self._read_s += self.decoder.worker.prefill_time.seconds - read_before
        read_s = min(self._read_s, step_s) if reading else 0.0
        self._read_s -= read_s
        decoded = set()
        for report in reports:
            if report.row in self._reading:  # its first token, which reading the prompt gave
                self._reading.remove(report.row)
            else:
                decoded.add(report.row)
        for row in reading:
            self.shares[row].prefill_s += read_s / len(reading)
        if decoded:
            self._waited_s = 0.0
            decode_s, part = (step_s - read_s) / len(decoded), 1 / len(decoded)
            for share in map(self.shares.__getitem__, decoded):
                share.decode_s += decode_s
                share.num_calls += part
        return reports

    def release(self, row: int, keep: bool = False) -> GenerationOutput:
        self._reading.discard(row)
        started, share = time.perf_counter(), self.shares[row]
        output = self.decoder.release(row, keep=keep)
        share.prefill_s += time.perf_counter() - started
        output.stats.prefill_s, output.stats.decode_s = share.prefill_s, share.decode_s
        return output
