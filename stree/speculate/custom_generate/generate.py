"""`model.generate(..., custom_generate=stree.CUSTOM_GENERATE, trust_remote_code=True)`."""

from stree.hf_model import generate

__all__ = ["generate"]
