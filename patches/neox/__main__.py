"""``python -m hybridcomp.patches.neox CONFIG.yml [CONFIG.yml ...]``, see ``train_neox``."""

from __future__ import annotations

import sys

from hybridcomp.patches.neox.train_neox import main

if __name__ == "__main__":
    main(sys.argv[1:])
