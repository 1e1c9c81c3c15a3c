"""Say what works on this machine, and what to do about what does not.

    stree doctor --target checkpoints/python-docs-hybrid

With --target it also plans how that model is loaded, so that a missing or misshapen weight shows
before a run. Ends with 0 when all needed parts work: PyTorch, disk and (with --target) memory
always; Triton wherever PyTorch sees a GPU; any other part when it is named with --need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from stree.checkpoints.plan.load_plan import plan_model
from stree.common.errors import UsageError
from stree.common.words import counted
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.resources import machine_checks as machine
from stree_pipelines.resources.estimates import held_in_8_bits

OPTIONAL = ("cuda", "mamba-ssm", "nccl", "gloo", "slurm")


def examine(target: str | None, run_dir: str, need: tuple[str, ...] = ()) -> list[str]:
    """Print a line per check and return the names of needed ones that fail.

    Raises the target's own errors when it cannot be loaded (`plan_model`).
    """
    plan = None if target is None else plan_model(target)
    if plan is not None:
        files = counted(len(plan.files), "file")
        weights = counted(len(plan.weights), "weight")
        print(f"ok    target     {weights} made of {files}, as its config describes them")
    checks: dict[str, Callable[[], str]] = {
        "torch": machine.check_torch,
        "cuda": machine.check_cuda,
        "triton": machine.check_triton,
        "mamba-ssm": machine.check_mamba_ssm,
        "nccl": partial(machine.check_backend, "nccl"),
        "gloo": partial(machine.check_backend, "gloo"),
        "slurm": machine.check_slurm,
        "disk": partial(machine.check_disk, Path(run_dir), None if plan is None else plan.config),
    }
    if plan is not None:
        checks["memory"] = partial(machine.check_memory, plan.config, held_in_8_bits(plan))
    needed = {"torch", "disk", "memory", *need, *(["triton"] if machine.HAS_CUDA else [])}
    failed = []
    for name, look in checks.items():
        try:
            print(f"ok    {name:10} {look()}")
        except machine.Absent as absent:
            mark = "FAILS" if name in needed else "-    "
            print(f"{mark} {name:10} {absent.found}: {absent.advice}")
            failed += [name] * (name in needed)
    return failed


def main(arguments: list[str] | None = None) -> None:
    parser = PlainParser("stree doctor", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--target", help="target folder: is there memory and disk for distilling from it?")
    add("--run_dir", default="runs", help="where runs are to be kept (default: runs)")
    add("--need", nargs="+", default=[], choices=OPTIONAL, metavar="WHAT",
        help=f"what must work here, too: {', '.join(OPTIONAL)}")
    options = parser.parse_args(arguments)
    target = options.target and input_path(options.target)
    failed = examine(target, options.run_dir, tuple(options.need))
    if failed:
        raise UsageError(f"needed here, and not working: {', '.join(failed)} (see above)")
    print("Everything that is needed works.")
