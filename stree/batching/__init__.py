"""Batch decoding: steps, runners, prefill, prefix cache."""
