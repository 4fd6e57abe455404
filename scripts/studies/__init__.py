"""What decided a design, or says what measurements mean elsewhere."""
