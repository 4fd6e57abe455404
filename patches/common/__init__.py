"""Routing of messages to channels, and stand-ins for modules, for the seams of all upstreams."""
