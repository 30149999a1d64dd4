"""By Inductor: trace with its decompositions, cut by min-cut, compile both halves."""
