"""What one operation frees, the next one of a training on a CPU has without asking the kernel."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from stree_pipelines.training.host_memory import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
x = torch.ones(1024, 1024)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        (x * 2).relu()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(kept, faults())
"""


def faults(how):
    command = [sys.executable, "-c", CODE, how]
    kept, count = subprocess.check_output(command, text=True).split()
    return kept == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_used_again():
    kept, count = faults("keep")
    if not kept:
        pytest.skip("no mallopt here")
    assert count < 100  # of 20 · 2 blocks of 1,024 pages each
    assert faults("leave")[1] > 2 * count  # what this is for
