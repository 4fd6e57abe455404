"""What is known of the objects of each upstream, for its seams. Nothing here is replaced."""
