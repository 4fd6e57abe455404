"""The ranks of a job: compare what they hold, name who died, write files together, end cleanly."""
