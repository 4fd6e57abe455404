"""Candidates of a draft as a tree after a sequence, and its accepted path (CaPE).

The trunk is the draft's greedy continuation. Each trunk token has siblings: more of them if the
draft was less confident (Du et al., GliDe with a CaPE, ICML 2024). Siblings have no children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: candidates per position; the index is ten times the draft's largest probability, rounded down
WIDTHS = (8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2)


@dataclass(frozen=True)
class Tree:
    """Nodes of one sequence, as in ``SequencePart``: each comes after its parent."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


def width_for(probability: float) -> int:
    """Return the number of candidates if the draft's largest probability is ``probability``."""
    return WIDTHS[min(int(10 * probability), len(WIDTHS) - 1)]


def most_nodes(gamma: int, cape: bool) -> int:
    """Return the maximum nodes of a tree with a trunk of ``gamma`` tokens after its root."""
    return 1 + gamma * (max(WIDTHS) if cape else 1)


def linearised(root: int, levels: Sequence[Sequence[int]]) -> Tree:
    """Return the tree with ``root``, then the trunk, then all siblings.

    ``levels``: candidates for each position after the root, the trunk's first.
    """
    tokens, parents = [root, *(level[0] for level in levels)], list(range(-1, len(levels)))
    for place, level in enumerate(levels):
        tokens += level[1:]
        parents += [place] * (len(level) - 1)
    return Tree(tuple(tokens), tuple(parents))


def accepted(tree: Tree, choices: Sequence[int]) -> list[int]:
    """Return the longest path from the root whose tokens the target would pick itself.

    ``choices``: for each node, the target's pick after it.
    """
    path = [0]
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        children.setdefault((parent, token), node)
    while (child := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path
