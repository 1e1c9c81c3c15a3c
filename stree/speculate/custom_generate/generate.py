"""`model.generate(..., custom_generate=stree.CUSTOM_GENERATE, trust_remote_code=True)`."""

from stree.transformers_decoder import generate

__all__ = ["generate"]
