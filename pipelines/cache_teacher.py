"""Compute a target's outputs once, for distillations that then do without it."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("cache_teacher")
