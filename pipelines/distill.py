"""Distil a drafter from a frozen target."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("distill")
