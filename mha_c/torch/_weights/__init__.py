"""What a call leaves, and the attention weights that are read from it."""
