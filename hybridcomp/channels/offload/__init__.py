"""Encoded copies between device and host, and encoded files of optimizer states."""
