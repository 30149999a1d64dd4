"""What a person reads of a plan: rows first, then tables and pictures of rows."""
