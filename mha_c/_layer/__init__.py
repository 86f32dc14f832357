"""What all NumPy layers share: their state, how one call runs, and the attention weights that a call keeps."""
