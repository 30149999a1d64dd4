"""What a plan knows, as data: collectives, parameters, memory; compared, and as JSON."""
