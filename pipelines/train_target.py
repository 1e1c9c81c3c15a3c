"""Train a hybrid target from scratch, with a tokenizer of its own if wanted."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("train_target")
