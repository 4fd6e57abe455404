"""Messages of a channel by their collective, and the references that deltas are added to."""
