"""Other gradient compression methods of data parallelism, for the same model and table.

torch's DDP hooks, and clean-room reimplementations from the papers without their authors' code,
marked as such. Not part of the hybridcomp package.
"""
