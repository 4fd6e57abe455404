"""The machines of a job.

cluster       lookups of the seconds of links, codecs and kernels, each with its spread
cluster_file  the file of a cluster: reading, writing, schema; ``described``: written by hand
rows          the rows of that file; ``figures``: numbers with a spread, curves through them
rings         closed forms for groups that were not measured
overheads     the host's work for a message; ``speeds``: relative speeds of the ranks
missing       names measurements that the file lacks, and their substitutes
"""
