"""What a step of a placed layout costs.

job       a model on a cluster: seconds of layers, messages of a layout
prices    one message: coding, wire, bytes
work      what every stage does; ``times``: its seconds, and a bound of the step
schedule  in which order (1F1B, interleaved)
step      the step as a timeline; ``recurrence``: its seconds alone; ``meetings``: of DeepSpeed's
          pipelines, whose stages meet for each message
memory    what a rank needs
predict   the prediction for people
"""
