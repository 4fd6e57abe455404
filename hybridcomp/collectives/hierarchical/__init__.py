"""Two levels: native inside a node, encoded between nodes."""
