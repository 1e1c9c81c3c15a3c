"""Ops of tree decoding: Triton kernels, and a twin of each in plain PyTorch."""
