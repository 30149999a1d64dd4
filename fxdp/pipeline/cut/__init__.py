"""Cut one program into stages and phases, and into one graph for each."""
