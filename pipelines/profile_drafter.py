"""Give a run's exported drafters their measured profile and a model card."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("profile_drafter")
