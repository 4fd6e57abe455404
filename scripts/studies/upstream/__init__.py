"""Code that runs inside the processes of upstream's tests."""
