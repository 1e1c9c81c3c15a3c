"""Layers of the hybrid model, a file for each kind."""
