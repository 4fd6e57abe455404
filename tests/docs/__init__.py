"""The documents: examples parse, names exist, generated parts are current."""
