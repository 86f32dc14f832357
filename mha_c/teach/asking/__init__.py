"""How somebody's attention is called, and what the book has for it: probes, forms, masks, mistakes, answers."""
