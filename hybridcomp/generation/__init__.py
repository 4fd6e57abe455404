"""Generate text on the ranks of a training job; each pipeline stage holds its layers' KV cache.

past          keys and values by sequence, and the part visible to a pass
stage_runner  a stage's layers over one pass of packed tokens, or of trees of candidates
picking       tokens from logits
requests      sequences of the next pass
frames        messages between stages
flight        batches in flight through all stages
generating    ``generate`` on the ranks of an engine, by the modules above
tree          candidates of a draft, and the accepted path
draft         a small model that predicts tokens, with or without the target's keys
drafting      a picker that verifies the draft's tokens
draft_training  a picker that trains drafts
gathered      gather all weights of a sharded model in few messages
rolling_out   let a model compute with gathered weights, then restore it
"""

from __future__ import annotations

from hybridcomp.generation.flight import GenerationFigures
from hybridcomp.generation.generating import GeneratingStage, answer
from hybridcomp.generation.past import KeyStore, PackedPass, PackedPast, SequencePart
from hybridcomp.generation.picking import Picked, Picker, Sampling
from hybridcomp.generation.stage_runner import StageRunner

__all__ = [
    "GeneratingStage", "GenerationFigures", "KeyStore", "PackedPass", "PackedPast", "Picked",
    "Picker", "Sampling", "SequencePart", "StageRunner", "answer",
]  # fmt: skip
