"""Generation from the ranks of a training, whose stages hold keys and values of their layers.

past          keys and values by sequence, and the part visible to a pass
stage_runner  a stage's layers over one pass of packed tokens, or of trees of candidates
picking       tokens from logits
requests      sequences of the next pass
frames        messages between stages
flight        batches in flight through all stages
generating    all of it on the ranks of an engine
tree          candidates of a draft, and the accepted path
draft         a small model that predicts, with or without the target's keys
drafting      a picker that verifies its tokens
draft_training  a picker that trains drafts
gathered      all weights of a model whose ranks hold shares, in few messages
rolling_out   a model that computes with them and is restored
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
