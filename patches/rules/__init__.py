"""Tables of rules: what upstream does with the traffic of each dimension.

``engine`` defines a rule, and checks a block against the rules that apply. The tables are ``ds``
and ``ds_offload`` (DeepSpeed), ``neox`` (GPT-NeoX, whose engine is DeepSpeed's) and ``mcore``
(megatron-core). No module here imports an upstream, so a file can be checked without one.
"""
