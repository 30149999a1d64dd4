"""Write one rank's program of a step: calls, transfers, sums and events in the order of the schedule."""
