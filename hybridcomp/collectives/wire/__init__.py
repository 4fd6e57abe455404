"""Wire: the layer between codecs and torch.distributed that all collectives use.

group           the ranks of a message, how values are sent between them and how they are summed
handle          steps of a collective, the handle that drives them, the meter of bytes and seconds
steps           steps without a message, or with a single one
chunking        cutting tensors into chunks for ranks, at parameters, and into rounds
encoding        encoding, decoding, error feedback, buffers
exchange_plan   plans of all-to-alls of payloads, and of sums that use them
exchanges       all-to-all of payloads, and sums at owners
message_rounds  cutting long messages, so that coding overlaps with sending
varying         payloads of variable size
batched_kernels all payloads in few launches, on a GPU
gathers         all-gather of payloads
chained_gather  all-gather over several groups, one after the other
payload_sizes   sizes of payloads of variable size
splits          lengths of the parts of an all-to-all
transport       bytes between ranks; only this calls torch.distributed for messages
staging         pinned host memory for GPU tensors over gloo
device_clock    GPU time of encoding and waiting
profiler_ranges spans of each message in a trace of torch's profiler
"""
