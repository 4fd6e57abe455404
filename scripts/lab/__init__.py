"""A small cluster on one Linux machine: nodes are network namespaces, links are shaped."""
