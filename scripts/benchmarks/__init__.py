"""Benchmarks that compare hybridcomp with peers."""
