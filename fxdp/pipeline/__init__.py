"""Programs in stages and micro-batches, as values: their schedule, their cut, their text."""
