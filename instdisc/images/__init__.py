"""Image sets: where they are, how they are read, augmented and batched."""
