"""Is it exact? Every model, op, library and trainer, beside one eager device."""
