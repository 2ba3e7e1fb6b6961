"""Trees of fixed shape filled by the MTP head, level by level, over the cache of ``head_cache``."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from treejax import layers
from treejax.drafters.base import Draft
from treejax.drafters.candidates import Step, drawn, head_sampling, ranked, target_noise
from treejax.drafters.head_cache import HeadMemory, Passes
from treejax.drafters.topologies import StaticTree
from treejax.drafters.vocabulary import to_full, to_tokens
from treejax.shapes import Array


def draft_tokens(
    draft: Draft, memory: HeadMemory, tree: StaticTree, pending: Array
) -> tuple[Array, HeadMemory]:
    """``fill_tree`` with the head's likeliest tokens: [B, N] int32, siblings differ."""
    tokens, _, memory = fill_tree(draft, memory, tree, pending)
    return tokens, memory


def fill_tree(
    draft: Draft,
    memory: HeadMemory,
    tree: StaticTree,
    pending: Array,
    draws: str = "top",
    step: Step | None = None,
) -> tuple[Array, Array | None, HeadMemory]:
    """Fill ``tree`` below ``pending`` [B]: tokens [B, N], q [B, N, V] or None, and the memory.

    The memory comes back with the waiting rows in its cache, not yet counted: proposing twice
    gives the same tree. One head pass and one ``lm_head`` product a level, over the nodes that
    have children.

    Args:
      draws: one of ``candidates.DRAWS``; the last two have a q.
      step: keys and committed length, which drawing and ranking with noise need; None where every
        sequence is greedy.
    """
    pending = pending.astype(jnp.int32)
    passes, size = Passes(draft, memory, pending), draft.config.vocab_size
    sampling = head_sampling(draft.weights, draft.sampling)
    tokens, hidden = {0: pending}, {-1: passes.newest}
    drafted: list[int] = []
    q = None
    for depth in range(tree.max_depth):
        inner = [v for v in range(tree.capacity) if tree.depths[v] == depth and tree.children(v)]
        above = jnp.stack([hidden[tree.parents[v]] for v in inner], axis=1)
        chosen = jnp.stack([tokens[v] for v in inner], axis=1)
        drafted += inner
        mask = np.array([[v in path for v in drafted] for path in map(tree.path, inner)])
        outputs = passes.level(above, chosen, depth, mask)
        logits = layers.logits(draft.weights, outputs)
        if draws in ("top", "coupled"):
            shared = step if draws == "coupled" else None
            g = target_noise(draft.weights, sampling, shared, depth, size)
            width = max(len(tree.children(v)) for v in inner)
            columns = ranked(logits, sampling, g, width)
        else:
            slots = _slots(tree, inner, draws)
            columns, rows = drawn(logits, sampling, step, slots, draws == "iid")
            q = jnp.zeros((len(pending), tree.capacity, size), jnp.float32) if q is None else q
            q = q.at[:, np.array(inner)].set(to_full(draft.weights, rows, size))
        best = to_tokens(draft.weights, columns)
        for i, v in enumerate(inner):
            hidden[v] = outputs[:, i]
            tokens |= {child: best[:, i, rank] for rank, child in enumerate(tree.children(v))}
    return jnp.stack([tokens[v] for v in range(tree.capacity)], axis=1), q, passes.memory


def _slots(tree: StaticTree, inner: list[int], draws: str) -> Any:
    """[m, count] rows that key the noise: each child's own, or the parent's for all its children.

    Past a node's last child it is repeated; what is drawn there is not used.
    """
    width = max(len(tree.children(v)) for v in inner)
    if draws == "iid":
        every = [tree.children(v) for v in inner]
    else:
        every = [(v,) for v in inner]
    return jnp.array([(*row, *row[-1:] * (width - len(row))) for row in every], jnp.int32)
