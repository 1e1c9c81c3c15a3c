"""Say what works on this machine, and what to do about what does not."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("doctor")
