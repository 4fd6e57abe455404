"""Patches of upstream attributes: one module per seam, one folder per upstream.

``registry`` lists the modules and loads them; no module imports ``registry``. ``template`` is the
module to copy for a new seam.
"""

from __future__ import annotations

if __name__ != "hybridcomp.patches":
    # from the repository root `import patches` finds this folder too, and would make a second copy
    # of every module and of the list of applied patches
    raise ImportError("import hybridcomp.patches, not patches")
