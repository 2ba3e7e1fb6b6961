"""Coupled equality: streams through trees against plain draws with the same keys, token for token.

The strongest test of the rule ``match``: whatever a tree holds, however it is packed, padded or cut
and whoever else is in the batch, each sequence must be handed what plain decoding would have drawn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.sampler.faults.base import Given, Sampler
from treejax.audit.sampler.walks import POISON, history_of, keys_of, rows_of, walk_batch
from treejax.audit.sampler.worlds import World
from treejax.history import History, extend
from treejax.requests import Request
from treejax.sampling import Sampling, per_sequence
from treejax.shapes import Array
from treejax.text import TextStream
from treejax.tree import Tree

CAPACITY, DEPTH = 10, 4


def different_streams(
    world: World, sampler: Sampler, sequences: int, tokens: int, *seed: int
) -> tuple[np.ndarray, float]:
    """([sequences] bool: the stream is not plain's, accepted candidates a step).

    Every sequence has its own key, budget (up to ``tokens``) and trees of random shape, packing and
    size, which hold what will really come often enough to be accepted.
    """
    rng, size = np.random.default_rng(seed), world.vocabulary
    keys, sampling = keys_of(sequences, *seed), world.sampling.prepared(size)
    plain = _plain(world, sampler, sampling, keys, tokens + DEPTH + 2)
    stops: set[int] = set(world.sampling.end_tokens or ())
    budgets = rng.integers(1, tokens + 1, sequences)
    requests = [Request(list(world.prompt), int(n), stops, TextStream(None)) for n in budgets]
    states = np.full(sequences, world.start)
    pending = np.full(sequences, world.root, np.int32)
    history, fault = history_of(world, sampling, sequences), sampler.fault
    emitted, steps, accepted = np.zeros(sequences, int), 0, 0
    while not all(request.finished for request in requests):
        packed = [_likely_tree(rng, size, plain[row, emitted[row] :]) for row in range(sequences)]
        for (drafted, _), token in zip(packed, pending, strict=True):
            drafted[0] = token
        tree = Tree.from_parents(*zip(*packed, strict=True), capacity=CAPACITY, max_depth=DEPTH)
        logits = np.stack(
            [_rows(world, *draft, state) for draft, state in zip(packed, states, strict=True)]
        )
        limit = [r.depth_limit for r in requests]
        if fault is not None and fault.limit is not None:
            limit = [fault.limit(request) for request in requests]
        length = jnp.asarray(len(world.prompt) + emitted, jnp.int32)
        given = tree, jnp.asarray(logits), sampling, keys, length, history
        out, count, history = _step(sampler.inside, *given, jnp.asarray(limit, jnp.int32))
        out, count = np.asarray(out), np.asarray(count)
        for row, request in enumerate(requests):
            got = out[row, : count[row]].tolist()
            if request.finished or not got:
                continue
            steps, accepted = steps + 1, accepted + len(got) - 1
            if fault is not None and fault.deliver is not None:
                fault.deliver(request, got)
            else:
                request.take(got, [0.0] * len(got))
            for token in got:
                states[row] = world.after[states[row], min(max(token, 0), size - 1)]
            pending[row], emitted[row] = got[-1], emitted[row] + len(got)
    wanted = [_cut(row, int(n), stops) for row, n in zip(plain, budgets, strict=True)]
    differs = [r.tokens != want for r, want in zip(requests, wanted, strict=True)]
    return np.array(differs), accepted / max(steps, 1)


def _cut(stream: np.ndarray, budget: int, stops: set[int]) -> list[int]:
    """What a request must be handed of a stream: to its first stop token, within its budget."""
    handed: list[int] = []
    for token in stream[:budget].tolist():
        handed.append(token)
        if token in stops:
            break
    return handed


def _plain(
    world: World, sampler: Sampler, sampling: Sampling, keys: Array, count: int
) -> np.ndarray:
    """[B, count] tokens of plain decoding: walks that take no step with a tree."""
    batch = keys.shape[0]
    start = tuple(jnp.full(batch, value, jnp.int32) for value in (world.start, world.root))
    tokens, _ = walk_batch(
        Sampler(sampler.rule, sampler.proposals),
        world.tree,
        count,
        0,
        rows_of(world),
        start,
        sampling,
        keys,
        jnp.full(batch, len(world.prompt), jnp.int32),
        history_of(world, sampling, batch),
    )
    return np.asarray(tokens)


def _likely_tree(
    rng: np.random.Generator, vocabulary: int, future: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """Tokens and parents of a random tree in a random packing; siblings differ.

    A path of it follows ``future`` for a while.
    """
    size = int(rng.integers(1, CAPACITY + 1))
    parents, depth, below = [-1], [0], [0]
    for row in range(1, size):
        free = [v for v in range(row) if depth[v] < DEPTH and below[v] < vocabulary]
        above = free[-1] if rng.random() < 0.5 else int(rng.choice(free))
        parents.append(above)
        depth.append(depth[above] + 1)
        below[above] += 1
        below.append(0)
    tokens = np.zeros(size, np.int32)
    for above in range(size):
        children = [row for row in range(1, size) if parents[row] == above]
        tokens[children] = rng.permutation(vocabulary)[: len(children)]
    node = 0
    for true in future:
        children = [row for row in range(1, size) if parents[row] == node]
        if not children or rng.random() < 0.15:
            break
        node = int(rng.choice(children))
        other = [row for row in children if tokens[row] == true]
        tokens[other] = tokens[node]
        tokens[node] = true
    order = np.concatenate([[0], 1 + rng.permutation(size - 1)]).astype(int)
    place = np.argsort(order)
    return tokens[order], [-1 if parents[v] < 0 else int(place[parents[v]]) for v in order]


def _rows(world: World, tokens: np.ndarray, parents: list[int], state: int) -> np.ndarray:
    """[CAPACITY, V] logits of a tree's rows; past the tree poison."""
    rows = np.zeros((CAPACITY, world.vocabulary), np.float32)
    rows[:, 0] = POISON
    reached = {0: state}
    while len(reached) < len(parents):
        for row, above in enumerate(parents):
            if row not in reached and above in reached:
                reached[row] = int(world.after[reached[above], tokens[row]])
    for row, at in reached.items():
        rows[row] = world.target[at]
    return rows


@functools.partial(jax.jit, static_argnames="sampler")
def _step(
    sampler: Sampler,
    tree: Tree,
    logits: Array,
    sampling: Sampling,
    keys: Array,
    length: Array,
    history: History | None,
    limit: Array,
) -> tuple[Array, Array, History | None]:
    """Tokens [B, P] that a step puts out, how many, and the histories after it."""
    tree, order = tree.trim_with_order(limit)
    logits = jnp.take_along_axis(logits, order[:, :, None], axis=1)
    own, own_keys, position = per_sequence(tree.batch, sampling, keys, length, logits.shape[2])
    assert own_keys is not None and position is not None
    given = Given(tree, None, logits, own, own_keys, position, history)
    choice = sampler.choose(given).mask(limit >= 0)
    tokens, count = choice.emitted(sampler.tree(given))
    if history is not None:
        consumed = jnp.concatenate([tree.tokens[:, :1], tokens[:, :-1]], axis=1)
        history = extend(history, consumed, count)
    return tokens, count, history
