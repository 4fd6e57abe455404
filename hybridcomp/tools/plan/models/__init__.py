"""Models to train: chains or graphs of layers with their FLOPs and bytes, never allocated.

model        the data types; ``reading``: reads any of the forms below
decoder      closed forms of dense and MoE decoders
huggingface  ``config.json``; ``neox``: GPT-NeoX's YAML; ``arguments``: Megatron's, train_gpt.py's
traced       any module, by ``package:callable``
torch_tools  the one module that uses torch's private tools
"""
