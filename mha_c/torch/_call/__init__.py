"""How one call of a torch module or function is computed: choice.py chooses a way, the other modules are the ways."""
