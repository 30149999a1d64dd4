"""Models that libraries list themselves, as entries of the zoo's sweep."""
