"""Which drafters of a shape draft as fast as its own: deeper or wider ones with a smaller head.

python pipelines/bench_decode.py runs/bench/drafters.jsonl --shape 8b --what "[draft]" \\
    --drafters "[own,head=32768,rank=256,layers=4,width=2048]"
python pipelines/bench_drafters.py --shape 8b --rows runs/bench/drafters.jsonl
python pipelines/bench_drafters.py --shape 8b

With rows of bench_decode.py, times are as measured, or by a fit to them (a level takes a constant,
a part for each layer and one for each byte of weights that it reads). Without, a drafter's time is
taken to be its bytes alone, which leaves launches out: a guide to what is worth measuring.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import stree.threads  # noqa: F401  (before torch is loaded)

import numpy as np
import torch

from stree.description import size
from stree.errors import BadData, NotFound, UsageError, exit_with_reason
from stree.models.hybrid import HybridModel
from stree_pipelines.bench_report import rows_of_file
from stree_pipelines.benches.calls import level_bytes
from stree_pipelines.benches.models import FLOAT8, OWN, SHAPES, drafter_config
from stree_pipelines.terminal.command_line import CommandParser


@dataclass(frozen=True)
class Cost:
    """What a level of a draft is: weights as it reads them, and how many the layers have."""

    kind: str
    num_layers: int
    level_bytes: int
    layer_parameters: int

    @classmethod
    def of(cls, shape: str, kind: str) -> Cost:
        config = drafter_config(shape, kind)
        with torch.device("meta"):
            model = HybridModel(config).to(torch.bfloat16)
        if FLOAT8 in kind:
            model.put_head_in_8_bits()
        layers = sum(each.numel() for each in model.model.layers.parameters())
        return cls(kind, config.num_layers, level_bytes(model), layers)


class Fit:
    """µs of a draft by least squares over measured ones: constant, layers and bytes of its levels.

    Raises BadData with fewer rows than numbers to find.
    """

    def __init__(self, measured: dict[str, float], costs: dict[str, Cost]) -> None:
        self.depths = {costs[kind].num_layers for kind in measured}
        inputs = np.array([self._inputs(costs[kind]) for kind in measured])
        times = np.array(list(measured.values()))
        if np.linalg.matrix_rank(inputs) < inputs.shape[1]:
            raise BadData(
                f"{len(measured)} drafters were measured ({', '.join(measured)}), a fit needs some "
                "that differ in what a level reads: measure more with bench_decode.py --drafters"
            )
        self._factors = np.linalg.lstsq(inputs, times, rcond=None)[0]
        self.worst = float(np.abs(inputs @ self._factors / times - 1).max())

    def knows(self, cost: Cost) -> bool:
        """Whether the measured ones say what another number of layers costs."""
        return len(self.depths) > 1 or cost.num_layers in self.depths

    def __call__(self, cost: Cost) -> float:
        return float(np.array(self._inputs(cost)) @ self._factors)

    def _inputs(self, cost: Cost) -> list[float]:
        layers = [float(cost.num_layers)] if len(self.depths) > 1 else []
        return [1.0, cost.level_bytes / 1e6, *layers]


def kinds(shape: str, layers: Sequence[int], widths: Sequence[int], heads: Sequence[int],
          ranks: Sequence[int]) -> Iterator[str]:  # fmt: skip
    """All combinations that there can be; what is as in the shape's own is not named."""
    own = drafter_config(shape)
    usual = {"head": own.vocab_size, "rank": 0, "layers": own.num_layers, "width": own.d_model}
    for values in itertools.product(heads, ranks, layers, widths):
        changes = {
            name: value for name, value in zip(usual, values, strict=True)
            if value and value != usual[name]
        }  # fmt: skip
        kind = "+".join(f"{name}={value}" for name, value in changes.items()) or OWN
        try:
            drafter_config(shape, kind)
        except UsageError:
            continue
        yield kind


def measured_times(path: str, shape: str) -> dict[str, float]:
    """µs by drafter, the last row of each. Raises NotFound and BadData."""
    if not Path(path).is_file():
        raise NotFound(f"there is no file {path}: write it with bench_decode.py --what [draft]")
    rows = [
        row for row in rows_of_file(Path(path))
        if row.get("what") == "draft" and row.get("shape") == shape and "tree" not in row
    ]  # fmt: skip
    made = {(row["environment"]["git_sha"], row["environment"]["device"]) for row in rows}
    if len(made) > 1:
        raise BadData(f"{path} has rows of {len(made)} devices or commits: give those of one")
    found = {row.get("drafter", OWN): float(row["us_draft"]["median"]) for row in rows}
    if OWN not in found:
        raise BadData(f"{path} has no draft of the shape {shape}'s own drafter: measure it, too")
    return found


def table(
    costs: dict[str, Cost], measured: dict[str, float], fit: Fit | None, within: float
) -> Iterator[tuple[str, ...]]:
    """A line a drafter that takes as long as the shape's own, the largest layers first."""
    own = measured[OWN] if measured else float(costs[OWN].level_bytes)
    found: list[tuple[Cost, float, str]] = []
    for cost in costs.values():
        if fit is None:
            found.append((cost, cost.level_bytes / own, "bytes alone"))
        elif cost.kind in measured:
            found.append((cost, measured[cost.kind] / own, "measured"))
        elif fit.knows(cost):
            found.append((cost, fit(cost) / own, "fitted"))
    for cost, share, how in sorted(found, key=lambda each: -each[0].layer_parameters):
        if abs(share - 1) <= within:
            yield (
                cost.kind, f"{cost.layer_parameters:,}", size(cost.level_bytes), f"{share:.2f}", how
            )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser("bench_drafters.py", description=__doc__)
    add = parser.add_argument
    add("--shape", type=str, default="8b", help=f"one of {', '.join(SHAPES)}")
    add("--rows", type=str | None, help="file of bench_decode.py with rows of drafts")
    add("--within", type=float, default=0.05, help="share by which times may differ")
    add("--layers", type=list[int], default=[1, 2, 3, 4, 6, 8])
    add("--widths", type=list[int], help="default: the shape's own, half, and one and a half of "
        "it, and twice")  # fmt: skip
    add("--heads", type=list[int], default=[0, 65536, 32768, 16384, 8192], help="0 for all tokens")
    add("--ranks", type=list[int], default=[0, 512, 256, 128], help="0 for one product")
    options = parser.parse_args(arguments)
    if options.shape not in SHAPES:
        raise UsageError(f"{options.shape!r} is not one of {', '.join(SHAPES)}")
    if not options.within >= 0:
        raise UsageError(f"--within is {options.within}, wanted at least 0")
    width = drafter_config(options.shape).d_model
    widths = options.widths or [width, width // 2, 3 * width // 2, 2 * width]
    chosen = kinds(options.shape, options.layers, widths, options.heads, options.ranks)
    measured = measured_times(options.rows, options.shape) if options.rows else {}
    names = dict.fromkeys([OWN, *measured, *chosen])
    costs = {kind: Cost.of(options.shape, kind) for kind in names}
    fit = Fit(measured, costs) if measured else None
    equal = list(table(costs, measured, fit, options.within))
    print(f"{options.shape}: drafters that draft as long as its own, ± {options.within:.0%}")
    print("drafter | parameters of layers | a level reads | time over own | how")
    for line in equal:
        print(" | ".join(line))
    if fit is not None:
        print(f"the fit is off by {fit.worst:.1%} at most where it was measured")
    unmeasured = [line[0] for line in equal if line[-1] in ("bytes alone", "fitted")]
    if unmeasured:
        print(
            f'to measure: bench_decode.py FILE --shape {options.shape} --what "[draft]" '
            f'--drafters "[{",".join([OWN, *unmeasured][:8])}]"'
        )


if __name__ == "__main__":
    exit_with_reason(main)
