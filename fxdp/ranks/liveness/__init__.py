"""Liveness of the ranks: detect ranks that are late or dead, tell all others, and end their calls."""
