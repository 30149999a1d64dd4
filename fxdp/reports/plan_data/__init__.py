"""The contents of a plan as data: collectives, parameters, memory; comparison of plans and JSON."""
