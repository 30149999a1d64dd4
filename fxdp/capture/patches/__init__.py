"""All that is different in Python while the user's code runs, and is put back afterwards."""
