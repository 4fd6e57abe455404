"""Seams of ZeRO-Offload and ZeRO-Infinity, and the memory that ZeRO 3 keeps."""
