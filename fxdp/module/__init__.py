"""The compiled module that a user calls: it binds a call, checks guards, and caches programs."""
