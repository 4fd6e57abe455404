"""Offline tools: what a user runs beside a job, and what no job imports."""
