"""What is known of the objects of megatron-core."""
