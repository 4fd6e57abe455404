"""Replace upstream functions, at once or when their module is imported."""
