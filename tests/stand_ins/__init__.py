"""What stands in for upstream packages, devices and groups; nothing here is the real thing."""
