"""Attention that a reader has written: told by names and numbers, then computed by the core, in the reader's class."""
