"""Seams of DeepSpeed's pipelines, with and without a flush after every batch."""
