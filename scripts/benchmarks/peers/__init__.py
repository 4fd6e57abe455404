"""Other gradient compression methods of data parallelism, for the same model and table.

torch's own methods under its engines, and clean-room reimplementations of ZeRO++ and SDP4Bit from
the papers without their authors' code, marked as such. Not part of the hybridcomp package.
"""
