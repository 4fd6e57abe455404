"""Parts of train_neox.py."""
