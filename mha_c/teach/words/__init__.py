"""The sentences of answers, and their translations."""
