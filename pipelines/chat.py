"""Chat with a target in the terminal, and see what its drafter saves."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("chat")
