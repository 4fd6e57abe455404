"""Collectives in two levels: native messages inside a node, encoded ones between nodes."""
