"""Every upstream attribute that hybridcomp replaces: one module per seam, one folder per upstream.

``registry`` holds the list of the modules and loads them; no module imports it from below.
``template`` is what a new one is copied from.
"""

from __future__ import annotations

if __name__ != "hybridcomp.patches":
    # from the repository root `import patches` finds this folder too, and would give a second copy
    # of every module and of what is applied
    raise ImportError("import hybridcomp.patches, not patches")
