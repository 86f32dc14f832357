"""How one call of a torch module or function is computed: ways.py chooses, the others are the ways."""
