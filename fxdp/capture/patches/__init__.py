"""Patches of Python and torch that are active while the user's code runs, and are undone afterwards."""
