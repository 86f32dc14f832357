"""`mha_c check FILE`: a file or a notebook is read, what of it is meant is chosen, and it is judged."""
