"""Compare drafters, trees and verifiers on one target, interleaved prompt by prompt."""

from stree_pipelines.run_script import run

if __name__ == "__main__":
    run("compare")
