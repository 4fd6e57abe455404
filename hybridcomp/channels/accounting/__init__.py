"""Count bytes and seconds of the messages, and the limits and timings that follow from them."""
