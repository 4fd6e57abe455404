"""Candidate trees: the accepted path is the longest that greedy decoding would take."""

from __future__ import annotations

import random

import pytest

from hybridcomp.generation.tree import WIDTHS, Tree, accepted, linearised, most_nodes, width_for


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_greedy_path_is_accepted(seed: int) -> None:
    draw = random.Random(seed)
    levels = [draw.sample(range(9), draw.randint(1, 6)) for _ in range(draw.randint(1, 6))]
    tree = linearised(draw.randrange(9), levels)
    # the target's pick after a node depends on the tokens of its path
    picks: dict[tuple[int, ...], int] = {}

    def path_of(node: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while node >= 0:
            tokens, node = (tree.tokens[node], *tokens), tree.parents[node]
        return tokens

    choices = [picks.setdefault(path_of(n), draw.randrange(9)) for n in range(len(tree.tokens))]
    path = accepted(tree, choices)
    assert path[0] == 0 and all(tree.parents[b] == a for a, b in zip(path, path[1:], strict=False))
    greedy = [tree.tokens[0]]
    paths = {path_of(n) for n in range(len(tree.tokens))}
    while tuple(greedy) in paths:
        greedy.append(picks[tuple(greedy)])
    assert [tree.tokens[n] for n in path] == greedy[:-1]


def test_siblings_stand_behind_the_trunk() -> None:
    tree = linearised(7, [[1, 2, 3], [4], [5, 6]])
    assert tree == Tree((7, 1, 4, 5, 2, 3, 6), (-1, 0, 1, 2, 0, 0, 2))
    assert accepted(tree, [1, 4, 6, 0, 0, 0, 9]) == [0, 1, 2, 6]
    assert accepted(tree, [3, 4, 6, 0, 0, 0, 9]) == [0, 5]


def test_widths_are_the_published_ones() -> None:
    assert [width_for(p / 10 + 0.05) for p in range(10)] == [8, 8, 8, 6, 6, 6, 4, 4, 2, 2]
    assert width_for(1.0) == 2 and width_for(0.0) == max(WIDTHS)
    assert most_nodes(5, True) == 41 and most_nodes(5, False) == 6
