"""Studies: upstream's own tests with the patches armed."""
