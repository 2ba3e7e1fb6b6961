"""Prompt lookup on Python lists, and reading a proposed tree back; imports nothing of ours."""

from collections import Counter


def continuations(context, lookup, depth):
    """What followed the most recent earlier occurrences of the longest suffix, latest first."""
    for count in range(lookup.longest, lookup.shortest - 1, -1):
        suffix = context[len(context) - count :] if count <= len(context) else None
        ends = [
            end
            for end in range(len(context) - 1, count - 1, -1)
            if suffix is not None and context[end - count : end] == suffix
        ]
        if ends:
            return [_copy(context, end, depth) for end in ends[: lookup.matches]]
    return []


def _copy(context, start, count):
    """Copy from ``start`` token by token, so that a copy may read what it has just written."""
    text = list(context)
    for i in range(count):
        text.append(text[start + i])
    return tuple(text[len(context) :])


def best_prefixes(found, nodes):
    """The most shared prefixes: by count, then the shorter, then the more recent occurrence."""
    counts, latest = Counter(), {}
    for recency, tokens in enumerate(found):
        for size in range(1, len(tokens) + 1):
            counts[tokens[:size]] += 1
            latest.setdefault(tokens[:size], recency)
    order = sorted(counts, key=lambda p: (-counts[p], len(p), latest[p]))
    return order[:nodes]


def majority(found):
    path = ()
    while found and len(path) < len(found[0]):
        alive = [tokens for tokens in found if tokens[: len(path)] == path]
        votes = Counter(tokens[len(path)] for tokens in alive)
        path += (max(votes, key=lambda token: votes[token]),)  # first, i.e. most recent, on a tie
    return path


def as_paths(tree, b):
    """Per active row but the root: the tokens from below the root down to it, in row order."""
    paths = [()]
    for row in range(1, int(tree.size[b])):
        parent = int(tree.parent[b, row])
        assert 0 <= parent < row
        paths.append((*paths[parent], int(tree.tokens[b, row])))
    return paths[1:]
