"""The seams of GPT-NeoX, one module each; its DeepSpeed engine is patched by ``ds``."""
