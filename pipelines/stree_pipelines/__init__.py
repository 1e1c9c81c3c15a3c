"""Training, evaluation and comparison of drafters: what the commands of pipelines/ do."""
