"""Building the tree: from draft logits to masks, positions and links."""
