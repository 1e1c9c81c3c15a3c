"""Write a run's report, or that of several runs together; print its tables."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("report")
