"""Benches, studies and the papers' tables: they need a clone, and ship in no wheel."""
