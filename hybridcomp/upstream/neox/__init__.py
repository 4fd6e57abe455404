"""What is known of a checkout of GPT-NeoX."""
