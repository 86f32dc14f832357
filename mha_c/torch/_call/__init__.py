"""How one call of a torch module or function is computed: ways.py chooses a way, the other modules are the ways."""
