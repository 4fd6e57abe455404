"""Measure the speed of a cluster's links, codecs and devices: ``hybridcomp measure``.

options   its arguments, and the help that it prints without a launcher
command   the command under a launcher
run       one measurement, its parts one after the other, and the resulting cluster
team      the ranks that measure: agreement on figures, shapes of groups, the budget of time
clock     timing a call, alone or during matrix products, on a host and on a GPU; ``throttle``:
          limits of a host's CPU time
links     collectives of torch.distributed, alone and with others at work
messages  encoded collectives from the call to the result
channels  messages of tp, pp, ep and cp through the channels of their dimensions
coders    codecs, and copies between device and host
kernels   matrix products, elementwise work, Adam steps and transformer blocks
block     the transformer block that is timed
machine   a rank's memory and versions
report    a cluster in a few lines

A launcher starts it like a training, on the real machines:

    torchrun --nproc-per-node 8 ... -m hybridcomp.tools.measure --out cluster.json
    deepspeed --hostfile hosts --module hybridcomp.tools.measure --out cluster.json
"""
