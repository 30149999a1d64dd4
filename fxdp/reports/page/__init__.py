"""A plan as one page of HTML that needs nothing else: no network, no scripts, light and dark."""
