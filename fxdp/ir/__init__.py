"""What a program is made of: placements, sizes, types, slots and notes, its text, and the ops fxdp adds."""
