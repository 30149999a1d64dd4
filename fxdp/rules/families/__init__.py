"""Sharding rules, one file per family of ops; importing this package registers all rules."""

import pkgutil
from importlib import import_module

# every file is a family, so a new one needs no entry elsewhere
for _family in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
