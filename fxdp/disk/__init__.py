"""Caches on disk that outlive a run, in a folder that only the user can write."""
