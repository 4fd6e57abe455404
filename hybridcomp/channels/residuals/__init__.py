"""Keep what encodings leave out for later messages, and find it by parameter."""
