"""Rules by which requests change the target's logits before they filter and sample them."""
