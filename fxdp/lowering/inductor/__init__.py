"""Lower by Inductor: trace with Inductor's decompositions, partition by min-cut, compile both graphs."""
