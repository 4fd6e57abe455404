"""Replace an upstream's functions, at once or when its module is imported."""
