"""Go on with another number of ranks: samples, batches, and checkpoints that are taken over.

Imported only by scripts that call ``hybridcomp.resume`` or use ``hybridcomp.ElasticSampler``, and
by ``hybridcomp replan``.
"""
