"""Parts of prove_on_gpu.py: its steps, their runner, and files carried between calls."""
