"""Speculative tree decoding for state-space and hybrid language models."""
