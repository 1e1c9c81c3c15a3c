"""Benchmark a drafter checkpoint against a baseline; exit with 70 when it is worse beyond noise."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("benchmark_checkpoint")
