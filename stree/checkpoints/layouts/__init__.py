"""Layouts of checkpoints that are no family of transformers' hybrids (../families), a file each."""
