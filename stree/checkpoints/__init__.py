"""Checkpoints of every layout as models, and back."""
