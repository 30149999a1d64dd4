"""What the suites share: rank processes, models, counters."""
