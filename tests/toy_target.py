"""Toy targets: rows indexed by the whole context.

A row read from the wrong node, parent or position changes what is drawn.
"""

import numpy as np


def contexts(tokens, parents):
    """The tokens below the root on the way to each row, the row included."""
    above = []
    for node in range(len(tokens)):
        path = []
        while node > 0:
            path.append(int(tokens[node]))
            node = parents[node]
        above.append(tuple(reversed(path)))
    return above


class Target:
    """A toy target: logits from a table indexed by a hash of the whole context."""

    def __init__(self, seed, vocabulary):
        self.table = np.random.default_rng(seed).standard_normal((997, vocabulary)) * 2
        self.vocabulary = vocabulary

    def row(self, context):
        index = 0
        for token in context:
            index = (index * 31 + token + 1) % 997
        return self.table[index].astype(np.float32)

    def tree_rows(self, committed, tokens, parents, capacity):
        """Logits [capacity, V]; ``committed`` ends with the root's token. NaN past the tree."""
        rows = np.full((capacity, self.vocabulary), np.nan, np.float32)
        for node, path in enumerate(contexts(tokens, parents)):
            rows[node] = self.row([*committed, *path])
        return rows
