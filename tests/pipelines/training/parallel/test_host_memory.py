"""Memory that one operation of a training on a CPU frees serves the next without the kernel."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from stree_pipelines.training.parallel.host_memory import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in 5 * [1, 3, 5, 7]:
        blocks = [torch.ones(size * 2**20) for _ in range(6)]
        while blocks:
            blocks.pop(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(kept, faults())
"""


def faults(how):
    command = [sys.executable, "-c", CODE, how]
    kept, count = subprocess.check_output(command, text=True).split()
    return kept == "True", int(count)


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again():
    kept, count = faults("keep")
    if not kept:
        pytest.skip("no mallopt here")
    assert count < 1000  # of 30 blocks of each size, 491,520 pages in all
    assert faults("leave")[1] > 10_000  # what this is for
