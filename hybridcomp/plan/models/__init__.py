"""What is trained: a chain or graph of layers with their work and their bytes, never allocated.

model        the words; ``reading``: any of the forms below, by what the user gives
decoder      closed forms of dense and MoE decoders
huggingface  ``config.json``; ``neox``: GPT-NeoX's YAML; ``arguments``: Megatron's, train_gpt.py's
traced       any module, by ``package:callable``
torch_tools  the one place that touches torch's private tools
"""
