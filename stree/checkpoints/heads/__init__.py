"""Heads that draft for the target whose hidden states they read: MTP heads, and EAGLE-3 heads."""
