"""Calls of a script's modules: compiled where that is one device's, else op by op."""
