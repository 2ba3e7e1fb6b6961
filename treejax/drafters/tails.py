"""What prompt lookup adds to a hydra: the spine's tail, and chains below the root's runners-up."""

import jax
import jax.numpy as jnp
import numpy as np

from treejax.drafters.base import Draft
from treejax.drafters.committed import Committed, extend
from treejax.drafters.lookup import Lookup, Matches, find_best
from treejax.drafters.prefixes import chain_score, walk
from treejax.drafters.topologies import Hydra
from treejax.shapes import Array

type _Chain = tuple[tuple[int, ...], tuple[int, ...]]


def fill_tails(draft: Draft, text: Committed, tokens: Array, hydra: Hydra, lookup: Lookup) -> Array:
    """``tokens`` [B, N], whose near rows are known, with what text or store hold below them.

    -1 where they hold nothing.
    """
    chains = _chains(hydra)
    found = _continuations(draft, text, tokens, chains, lookup)
    for i, (_, rows) in enumerate(chains):
        tokens = tokens.at[:, jnp.array(rows)].set(found[:, i, : len(rows)])
    return tokens


def _continuations(
    draft: Draft, text: Committed, tokens: Array, chains: list[_Chain], lookup: Lookup
) -> Array:
    """The majority's path below each chain's path: [B, chains, depth]."""
    depth = max(len(rows) for _, rows in chains)
    longest = max(len(path) for path, _ in chains)
    padded = np.array([path + path[-1:] * (longest - len(path)) for path, _ in chains])
    counts = np.array([len(path) for path, _ in chains], np.int32)

    def score(group: Matches) -> Array:
        return chain_score(group, lookup)

    def one(text: Array, length: Array, extra: Array, count: Array) -> Array:
        context = extend(text, length, extra)
        found = find_best(context, length + count, lookup, depth, score, draft.weights)
        return walk(found, lookup.least_value)[0]

    chained = jax.vmap(one, in_axes=(None, None, 0, 0))
    batched = jax.vmap(chained, in_axes=(0, 0, 0, None))
    return batched(text.tokens, text.length, tokens[:, padded], jnp.asarray(counts))


def _chains(hydra: Hydra) -> list[_Chain]:
    """The tail and the rescue chains: the path from the root to what each continues, its rows."""
    every = [hydra.tail_rows] + [hydra.rescue_rows(r) for r in range(len(hydra.rescue))]
    return [(hydra.path(hydra.parents[rows[0]]), rows) for rows in every if rows]
