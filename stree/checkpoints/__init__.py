"""Load checkpoints of every layout as models, and save models as checkpoints."""
