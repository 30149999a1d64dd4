"""What a network costs, which way each collective travels, and values in the form in which they travel."""
