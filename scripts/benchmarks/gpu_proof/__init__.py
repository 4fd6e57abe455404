"""Parts of prove_on_gpu.py: its steps, how they are run, and what is carried from call to call."""
