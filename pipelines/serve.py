"""Serve a target and its drafter behind OpenAI's API."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("serve")
