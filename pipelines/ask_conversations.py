"""Write users' questions from held-out conversations as prompts for --benchmarks."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("ask_conversations")
