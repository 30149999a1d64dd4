"""What runs at each step, and nothing else."""
