"""Memoized parts of torch: the same answers to the same questions while a model is traced."""
