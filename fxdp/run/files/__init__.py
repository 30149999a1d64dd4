"""Files of a script: rank 0 writes them, other ranks have their own, and none sees what was not yet there."""
