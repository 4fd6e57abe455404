"""Collectives in two or more levels: native inside nodes or sites, encoded between them."""
