"""From the user's module to a forward graph: what is exported, how, and what is read off the trace."""
