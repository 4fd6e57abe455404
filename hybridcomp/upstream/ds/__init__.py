"""What is known of the objects of DeepSpeed."""
