"""Examples one after another in one process: their file names, then the options of all."""

import runpy
import sys

names = [word for word in sys.argv[1:] if word.endswith(".py")]
options = sys.argv[1 + len(names) :]
for name in names:
    print(name.rpartition("/")[2])
    sys.argv = [name, *options]
    runpy.run_path(name, run_name="__main__")
