"""Resume with another number of ranks: divide samples and batches, and read checkpoints.

Imported only by scripts that call ``hybridcomp.resume`` or use ``hybridcomp.ElasticSampler``, and
by ``hybridcomp replan``.
"""
