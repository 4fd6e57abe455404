"""What the seams of several upstreams share: which channel a message takes, and stand-ins."""
