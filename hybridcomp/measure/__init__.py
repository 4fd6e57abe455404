"""``hybridcomp measure``: what links, codecs and devices of a cluster give, measured on it.

options   its arguments, and what it says to those who start it on one rank only
command   the command under a launcher
run       one measurement, its parts one after the other, and the file that comes of it
team      the ranks that measure: agreement on figures, shapes of groups, the budget of time
clock     timing a call, alone or beside matrix products, on a host and on a GPU; ``throttle``:
          where a host's CPU time is limited
links     collectives of torch.distributed, alone and with others at work
messages  encoded collectives from the call to the result
channels  messages of tp, pp, ep and cp through the channels of their dimensions
coders    codecs, and copies between device and host
kernels   matrix products, elementwise work, Adam steps and transformer blocks
block     the transformer block that is timed
machine   what a rank runs on, and with which versions
report    a cluster in a few lines

It is started like a training, on the real machines:

    torchrun --nproc-per-node 8 ... -m hybridcomp.measure --out cluster.json
    deepspeed --hostfile hosts --module hybridcomp.measure --out cluster.json
"""
