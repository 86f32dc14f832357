"""What every NumPy layer is: its state, one call of it, parameters as read, and the weights that a call keeps."""
