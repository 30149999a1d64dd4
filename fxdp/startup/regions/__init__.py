"""Regional compilation: compile one of several equal layers, and call its code for each."""
