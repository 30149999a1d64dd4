"""Types of values: placements on ranks, sizes in the batch size, and the mesh that both refer to."""
