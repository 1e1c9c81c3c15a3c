"""Choice of the tree of each step: acceptance, step times, bandit."""
