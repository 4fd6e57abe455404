"""Predict the cost of a step of a placed layout.

job       a model on a cluster: seconds of layers, messages of a layout
prices    one message: coding, wire, bytes
work      passes and messages of every stage; ``times``: their seconds, and a bound of the step
schedule  the order of passes (1F1B, interleaved)
step      seconds and tasks of a step; ``blocking_pipeline``: those of DeepSpeed's pipelines, whose
          sends and receives block
memory    bytes of a rank by kind
predict   the prediction for people
"""
