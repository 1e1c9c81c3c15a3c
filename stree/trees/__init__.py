"""Token trees: one tree, and the trees of a batch as tensors."""
