"""Models of ragged batches for `benchmarks.conformance.ragged`: a file for each kind of samples."""
