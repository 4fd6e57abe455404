"""Remove old versions of a folder: everything before the oldest full version that is to remain.

A receiver that reads at the moment keeps the files that it has open. One that finds a manifest or a
part gone looks again, and takes the newest full version, of which there is always one.
"""

from __future__ import annotations

import re
from pathlib import Path

from hybridcomp.publishing.destinations import PARTS, manifests_in, read_manifest_file

_PART = re.compile(r"v(\d{10})\..*\.part(\.unfinished)?")


def remove_old(folder: Path, keep: int) -> int:
    """Keep the newest ``keep`` full versions of ``folder`` and what follows them; remove the rest.

    Manifests go before their parts, so that no version looks readable without them; what an earlier
    call left behind goes as well. Returns how many versions were removed. Raises OSError, and
    PublishError where a manifest is damaged.
    """
    oldest = _oldest_kept(folder, keep)
    removed = 0
    for version, path in manifests_in(folder).items():
        if version < oldest:
            path.unlink(missing_ok=True)
            removed += 1
    for path in (folder / PARTS).iterdir():
        match = _PART.fullmatch(path.name)
        if match and int(match[1]) < oldest:
            path.unlink(missing_ok=True)
    return removed


def _oldest_kept(folder: Path, keep: int) -> int:
    """Return the version of the ``keep``-th newest full one; 0 where there are fewer."""
    for version, path in reversed(manifests_in(folder).items()):
        keep -= read_manifest_file(path, version).full
        if not keep:
            return version
    return 0
