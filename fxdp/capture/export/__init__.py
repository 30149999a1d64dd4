"""Export of the user's module to a forward graph, with rewrites of its code and analyses of the trace."""
