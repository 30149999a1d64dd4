"""How each op acts on placements, one file per family; importing this package registers them all."""

import pkgutil
from importlib import import_module

# a new family is a new file, which nothing else has to name
for _family in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
