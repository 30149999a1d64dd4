"""Present a plan to people: rows as data, then tables, text and pictures made from these rows."""
