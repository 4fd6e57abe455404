"""Run upstream's tests with the patches armed."""
