"""The token exchange of MoE layers (dispatch and combine).

``torch.distributed.all_to_all_single`` as ``mappings`` sees it (that seam is in
``tensor_parallel``) and not ``token_dispatcher``: its classes bind ``all_to_all`` by name, and
their methods change. The ``backward`` of ``_AllToAll`` calls its ``forward``, so it is marked here.

Tokens per expert differ from rank to rank: ``min_bytes`` does not count, and vectors (routing
probabilities, one in hidden_size of the bytes) stay native. Counts of tokens are integers and stay
native. DeepEP, HybridEP and other dispatchers move tokens themselves; ``check`` says so.
"""

from __future__ import annotations

from hybridcomp.patches.common.routes import Layers, make_backward
from hybridcomp.patches.mcore.groups import REQUIREMENT, dimension_of
from hybridcomp.patching import Seam

BACKWARD = Seam(
    requirement=REQUIREMENT,
    module="megatron.core.tensor_parallel.mappings",
    qualname="_AllToAll.backward",
    parameters=("ctx", "grad_output"),
)

#: the messages of ``mappings`` in a group of experts
TOKENS = Layers(lambda group: dimension_of(group, "ep"))

COVERS = ("ep",)
PATCHES = ((BACKWARD, make_backward),)
