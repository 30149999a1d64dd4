"""From an unmodified module to one joint forward and backward graph in global, symbolic shapes."""
