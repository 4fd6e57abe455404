"""Collectives in two levels or more: native messages inside the largest units, encoded between."""
