"""What a call keeps, and the attention weights that are computed from it."""
