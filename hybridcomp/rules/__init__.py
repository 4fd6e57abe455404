"""What upstream does with the traffic of each dimension, as tables that a block is held against.

``engine`` says what a rule is and what follows from one that applies. The tables are ``ds`` and
``ds_offload`` (DeepSpeed), ``neox`` (GPT-NeoX, whose engine is DeepSpeed's) and ``mcore``
(megatron-core). Nothing here imports an upstream, so that a file can be checked without one.
"""
