"""Programs in stages and micro-batches, as values: schedule, cut and text."""
