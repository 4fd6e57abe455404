"""Offline tools, which a user runs outside of jobs, and which no job imports."""
