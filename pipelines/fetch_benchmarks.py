"""Fetch MT-Bench, HumanEval, GSM8K and Spec-Bench from their public homes, for --benchmarks."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("fetch_benchmarks")
