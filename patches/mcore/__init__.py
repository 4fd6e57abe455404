"""The seams of megatron-core and of Transformer Engine's layers in it, one module each."""
