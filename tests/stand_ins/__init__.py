"""Stand-ins for upstream packages, devices and groups."""
