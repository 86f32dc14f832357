"""Checks the arguments of users and converts them to what the core takes."""
