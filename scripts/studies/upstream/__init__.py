"""What runs inside the processes of upstream's own tests."""
