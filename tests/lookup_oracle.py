"""Prompt lookup on Python lists, and reading a proposed tree back; imports nothing of ours."""

import heapq
from collections import Counter
from fractions import Fraction


class Found:
    """Occurrences of the last ``length`` tokens: what followed each, the latest first."""

    def __init__(self, length, texts):
        self.length, self.texts = length, texts

    def trie(self, least=0.0):
        """Every prefix whose share of the occurrences is at least ``least``, with that share."""
        counts = Counter(text[:size] for text in self.texts for size in range(1, len(text) + 1))
        shares = {prefix: Fraction(n, len(self.texts)) for prefix, n in counts.items()}
        return {prefix: share for prefix, share in shares.items() if float(share) >= least}


def groups(context, lookup, depth, responses=None):
    """The occurrences for every length that may decide, the longest first, context first."""
    result = []
    for count in range(lookup.longest, lookup.shortest - 1, -1):
        if count <= len(context):
            found = [Found(count, _in_context(context, count, depth)[: lookup.matches])]
            if responses is not None:
                suffix = context[len(context) - count :]
                found.append(
                    Found(count, _in_responses(responses, suffix, depth)[: lookup.matches])
                )
            result += [each for each in found if each.texts]
    return result


def decide(found, lookup, score):
    """The group that decides, or None: the longest match, or the best score, first on a tie."""
    if not found:
        return None
    return found[0] if lookup.rule == "longest" else max(found, key=score)


def _in_context(context, count, depth):
    suffix = context[len(context) - count :]
    ends = range(len(context) - 1, count - 1, -1)
    return [_copy(context, end, depth) for end in ends if context[end - count : end] == suffix]


def _in_responses(responses, suffix, depth):
    """Later responses first, and within one the later place; a copy ends with its response."""
    found = []
    for response in reversed(responses):
        for end in range(len(response) - 1, len(suffix) - 1, -1):
            if response[end - len(suffix) : end] == suffix:
                found.append(tuple(response[end : end + depth]))
    return found


def _copy(context, start, count):
    """Copy from ``start`` token by token, so that a copy may read what it has just written."""
    text = list(context)
    for i in range(count):
        text.append(text[start + i])
    return tuple(text[len(context) :])


def best_prefixes(values, nodes):
    """The ``nodes`` best of a trie {path: value}, as a heap gives them out.

    The largest value first, then the child of what came out earlier, then the lowest token.
    """
    heap, out = (
        [(-value, 0, path[-1], path) for path, value in values.items() if len(path) == 1],
        [],
    )
    heapq.heapify(heap)
    while heap and len(out) < nodes:
        *_, path = heapq.heappop(heap)
        out.append(path)
        for child, value in values.items():
            if child[:-1] == path:
                heapq.heappush(heap, (-value, len(out), child[-1], child))
    return out


def tree_score(found, least, nodes):
    return sum(sorted(found.trie(least).values(), reverse=True)[:nodes])


def majority(found, least=0.0):
    """The commonest next token after every token, the most recent on a tie."""
    path = ()
    while found is not None:
        alive = [
            text for text in found.texts if text[: len(path)] == path and len(text) > len(path)
        ]
        votes = Counter(text[len(path)] for text in alive)
        if not votes:
            break
        token = max(votes, key=lambda token: votes[token])  # the first is the most recent
        if float(Fraction(votes[token], len(found.texts))) < least:
            break
        path += (token,)
    return path


def chain_score(found, least):
    shares, path = found.trie(), majority(found, least)
    return sum(shares[path[: size + 1]] for size in range(len(path)))


def as_paths(tree, b):
    """Per active row but the root: the tokens from below the root down to it, in row order."""
    paths = [()]
    for row in range(1, int(tree.size[b])):
        parent = int(tree.parent[b, row])
        assert 0 <= parent < row
        paths.append((*paths[parent], int(tree.tokens[b, row])))
    return paths[1:]
