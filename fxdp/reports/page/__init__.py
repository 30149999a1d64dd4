"""Render a plan as one self-contained HTML page: no network, no scripts, light and dark."""
