"""The machines of a job.

cluster       what they can do: lookups of links, codecs and kernels, each with its spread
cluster_file  its file: reading, writing, schema; ``described`` is the form written by hand
rows          the rows of that file; ``figures``: numbers with a spread, curves through them
rings         closed forms where a group was not measured
overheads     the host's work for a message; ``speeds``: how fast ranks compute beside each other
missing       what the file does not say, for those who rely on it
"""
