"""Let a target answer prompts itself: text of the kind that a drafter meets when it drafts."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("generate_data")
