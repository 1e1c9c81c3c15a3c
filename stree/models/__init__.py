"""Decoder models: one readable file a model, key renaming in `convert`."""
