"""The hybrid model: its config, passes, caches and layers."""
