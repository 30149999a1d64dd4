"""The module a user holds: reads a call, notices changes, keeps programs."""
