"""Suggest the static tree with the longest expected acceptance, or the fastest one."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("suggest_tree")
