"""Check each part of a machine for doctor.py: does it work, and what to do if not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from stree.common.device_memory import free_memory_bytes
from stree.common.errors import first_line
from stree.common.words import counted, size
from stree.models.config import HybridConfig
from stree.models.slicing import drafter_config_from
from stree_kernels.mamba.chunk_scan import mamba_ssm_kernel
from stree_pipelines.resources.estimates import ModelPlan, num_parameters, training_memory

GIB = 1024**3
HAS_CUDA = torch.cuda.is_available()
ROW_TOKENS = 1024  # the default of data.sequence_length


class Absent(Exception):
    """Error of a part that does not work: the finding, and advice."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.found, self.advice = found, advice


def check_torch() -> str:
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if product[0, 0] != 8:
        raise Absent("a matrix product is wrong", "reinstall torch for this processor")
    return f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')} on the CPU"


def check_cuda() -> str:
    if not HAS_CUDA:
        build = torch.version.cuda
        raise Absent(
            f"PyTorch (built for CUDA {build}) sees no GPU" if build else "this is a CPU build",
            "small targets do without; else install NVIDIA's driver (nvidia-smi must list the GPU)"
            " and a CUDA build of torch",
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{len(names)} × {names[0]}, CUDA {torch.version.cuda}"


def check_triton() -> str:
    if not HAS_CUDA:
        return "not used without a GPU: the CPU runs the plain PyTorch twins"
    try:
        from stree_kernels import pointwise  # needs triton

        gate_up = torch.randn(2, 64, device="cuda")
        ours = pointwise.activated(gate_up, "swiglu")
        gate, up = gate_up.chunk(2, dim=-1)
        torch.testing.assert_close(ours, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-5)
    except Exception as error:  # compilers fail in many ways; all mean that kernels do not run
        raise Absent(
            f"a kernel does not compile or is wrong: {first_line(error)}",
            "install gcc and Python's headers (python3-dev), and the triton that torch asks for",
        ) from error
    return "a kernel compiles and is right"


def check_mamba_ssm() -> str:
    if mamba_ssm_kernel() is not None:
        return "its training kernel is used on GPUs"
    if importlib.util.find_spec("mamba_ssm") is not None:
        try:
            importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        except ImportError as error:
            raise Absent(
                f"installed, and not importable: {first_line(error)}",
                "it was built for another torch or CUDA: `pip install --force-reinstall "
                "--no-build-isolation --no-deps mamba-ssm`, or uninstall it and use our own scan",
            ) from error
    faster = (
        "training uses our own scan; `pip install -e '.[cuda]'` (with nvcc there, or a wheel for "
        "this torch) is faster"
    )
    raise Absent("not installed", faster if HAS_CUDA else "nothing is missing, only GPUs use it")


def check_backend(backend: str) -> str:
    """Sum over a group of this process alone: tests libraries and network interface, no other
    host."""
    if backend == "nccl" and not HAS_CUDA:
        raise Absent("no GPU", "training on several CPUs goes through gloo")
    device = "cuda" if backend == "nccl" else "cpu"
    if dist.is_initialized():
        return "in use by this process"
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = dist.FileStore(str(Path(folder, "store")), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            try:
                dist.all_reduce(torch.ones(1, device=device))
            finally:
                dist.destroy_process_group()
    except RuntimeError as error:
        raise Absent(
            f"{backend} fails: {first_line(error)}",
            "the host's name must resolve; or name the network interface in "
            f"{backend.upper()}_SOCKET_IFNAME (`ip link` lists them)",
        ) from error
    return "sums over a group of one"


def check_slurm() -> str:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        raise Absent("no sbatch here", "without a cluster nothing is missing; see slurm/README.md")
    try:
        command = ["sinfo", "--noheader", "--format=%P %D %t"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired as error:
        raise Absent("sinfo does not answer", "ask who runs the cluster; is munge up?") from error
    if answer.returncode:
        raise Absent(
            f"sinfo fails: {answer.stderr.strip().splitlines()[0] if answer.stderr else '?'}",
            "this host is not in a running cluster (slurm.conf, munge, slurmctld)",
        )
    return "partition, nodes, state: " + "; ".join(answer.stdout.split("\n")[:-1])


def check_disk(run_dir: Path, target: HybridConfig | None) -> str:
    path = run_dir.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.exists())
    if not folder.is_dir():
        raise Absent(f"{folder} is no folder", "choose another --run_dir")
    if not os.access(folder, os.W_OK):
        raise Absent(f"{folder} is not writable", "choose a --run_dir that is")
    free = shutil.disk_usage(folder).free
    # Kept: 2 training states of 12 bytes a parameter, a third while it is written; 10 exports.
    wanted = (3 * 12 + 10 * 4) * num_parameters(_drafter_of(target)) if target else GIB
    found = f"{free / GIB:.1f} GiB free for {run_dir}, a run takes about {wanted / GIB:.1f}"
    if free < wanted:
        raise Absent(found, "free some, choose another --run_dir, or lower export.log_spaced")
    return found


def check_memory(target: HybridConfig, in_8_bits: int = 0) -> str:
    """Estimate a distillation's memory on one device for a micro-batch of one row, and per further
    row.

    in_8_bits: numbers of the target's weights that its checkpoint stores in 8 bits.
    """
    drafter, dtype = _drafter_of(target), torch.bfloat16 if HAS_CUDA else torch.float32
    precision = "bf16-mixed" if HAS_CUDA else "32-true"
    plan = ModelPlan(drafter, target, dtype, in_8_bits)
    wanted, of_two = (
        sum(training_memory(plan, (rows, ROW_TOKENS), precision, HAS_CUDA).values())
        for rows in (1, 2)
    )
    free = free_memory_bytes(HAS_CUDA)
    found = (
        f"{size(free)} free; the target ({num_parameters(target) / 1e6:,.0f} M parameters in "
        f"{str(dtype).removeprefix('torch.')}{' and 8 bits' * (in_8_bits > 0)}) and its two-layer "
        "drafter "
        f"({num_parameters(drafter) / 1e6:,.0f} M) take about {size(wanted)} with a row of "
        f"{ROW_TOKENS:,} tokens, {size(of_two - wanted)} more for each other row of a batch"
    )
    if free < wanted:
        raise Absent(
            found, "use a larger device, a smaller target or fewer drafter layers, or share "
            "the weights among GPUs"
        )
    return found


def _drafter_of(target: HybridConfig) -> HybridConfig:
    """Return the two layers that distill.py would copy.

    A target without two Mamba-2 layers needs a described drafter; its first and last layer stand
    for that.
    """
    has_two = target.num_layers - len(target.attn_layers) >= 2
    return drafter_config_from(target, None if has_two else sorted({0, target.num_layers - 1}))
