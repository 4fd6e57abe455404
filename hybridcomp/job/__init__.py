"""The ranks of a job: compare their state, name dead ranks, write files together, end cleanly."""
