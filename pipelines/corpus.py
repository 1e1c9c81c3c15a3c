"""Unpack the embedded corpus: Python's own documentation as conversations, without a network."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("corpus")
