"""From capture to program: the order of passes as data, the runner, the invariants."""
