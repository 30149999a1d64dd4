"""Pipeline schedules as pure functions: who does what in which order, and the proof that nobody blocks."""
