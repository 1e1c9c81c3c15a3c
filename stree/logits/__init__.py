"""Changes of the target's logits that requests ask for, and log-probabilities of their tokens."""
