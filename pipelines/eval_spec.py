"""Evaluate drafter checkpoints: acceptance length and speed of chain and tree, and losslessness."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("eval_spec")
