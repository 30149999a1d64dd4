"""`python -m fxdp`, the same as the command `fxdp`."""

from __future__ import annotations

import sys

from fxdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
