"""The token exchange of MoE layers (dispatch and combine).

The seam, in ``tensor_parallel``, is ``torch.distributed.all_to_all_single`` as module ``mappings``
looks it up. ``token_dispatcher`` is no seam: its classes bind ``all_to_all`` by name, and their
methods change. The ``backward`` of ``_AllToAll`` calls its ``forward``; marking it here makes these
messages direction backward.

Tokens per expert differ from rank to rank: ``min_bytes`` does not apply, and vectors (routing
probabilities, 1/hidden_size of the bytes) stay native, as do token counts, which are integers.
DeepEP, HybridEP and other dispatchers send tokens themselves; ``check`` refuses or announces them.
"""

from __future__ import annotations

from hybridcomp.patches.common.routes import Layers, make_backward
from hybridcomp.patches.mcore.groups import dimension_of
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.seams.patching import Seam

BACKWARD = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.tensor_parallel.mappings",
    qualname="_AllToAll.backward",
    parameters=("ctx", "grad_output"),
)

#: the all-to-alls of ``mappings`` over expert-parallel groups
TOKENS = Layers(lambda group: dimension_of(group, "ep"))

COVERS = ("ep",)
PATCHES = ((BACKWARD, make_backward),)
