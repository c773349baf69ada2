"""The prefix tree of responses: what several begin with is there once, and every path spells its sequence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leeway.trainer.prefixes import Path, PrefixTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12)


def spelled(tree: PrefixTree, sequences: list[list[int]], path: Path) -> list[int]:
    tokens: list[int] = []
    for number, length in path:
        branch = tree.branches[number]
        assert 0 < length <= branch.length
        tokens += sequences[branch.sequence][branch.begin :][:length]
    return tokens


@given(SEQUENCES)
def test_each_beginning_is_there_once_and_each_path_spells_its_sequence(sequences: list[list[int]]) -> None:
    tree, paths = PrefixTree(), []
    for sequence in sequences:
        new, before = tree.num_new(sequence), tree.num_tokens
        paths.append(tree.add(sequence))
        assert tree.num_tokens == before + new
    assert tree.num_tokens == len({tuple(s[:k]) for s in sequences for k in range(1, len(s) + 1)})
    assert tree.num_tokens == sum(branch.length for branch in tree.branches)
    assert [spelled(tree, sequences, path) for path in paths] == sequences
    for branch in tree.branches:
        assert spelled(tree, sequences, branch.before) == sequences[branch.sequence][: branch.begin]
        assert all(number < tree.branches.index(branch) for number, _ in branch.before)
