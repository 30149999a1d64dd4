"""Pipeline schedules as pure functions: the order of each rank's actions, and the proof of no deadlock."""
