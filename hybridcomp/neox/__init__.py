"""Training GPT-NeoX from its checkout with hybridcomp: ``python -m hybridcomp.neox CONFIG.yml``."""
