"""Walks: many sequences at once decode a toy target through a rule, each with its own key.

Drafts are filled by the functions that fill the MTP head's trees, and ``select`` decides; what the
walks put out is counted and held against the exact law of the world by G-tests: of the token after
each context that is visited often enough, and of several tokens together, which see what one token
alone does not, such as a key that is used in two steps.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from treejax.audit.sampler.faults.base import Given, Sampler
from treejax.audit.sampler.g_test import g_test
from treejax.audit.sampler.worlds import SPARE, World
from treejax.drafters.base import DRAWN
from treejax.drafters.candidates import drawn, head_sampling, ranked, target_noise
from treejax.drafters.topologies import StaticTree
from treejax.history import History, begin, extend
from treejax.sampling import Sampling, per_sequence, process, sample
from treejax.shapes import Array
from treejax.tree import Tree

CHUNK = 25_000
"""Walks at once: enough to keep a device busy, few enough for any memory."""
VISITS = 2_000
"""Visits below which a context is not tested by itself."""
POISON = 30.0


class Rows(struct.PyTreeNode):
    """A world's arrays: target, draft [S, V] float32; after [S, V] int32."""

    target: Array
    draft: Array
    after: Array


def rows_of(world: World) -> Rows:
    return Rows(jnp.asarray(world.target), jnp.asarray(world.draft), jnp.asarray(world.after))


def history_of(world: World, sampling: Sampling, batch: int) -> History | None:
    """What penalties count of ``batch`` prompts of a world; None if prepared settings have none."""
    if not sampling.needs_history:
        return None
    prompt = jnp.broadcast_to(jnp.asarray(world.prompt, jnp.int32), (batch, len(world.prompt)))
    return begin(prompt, jnp.full(batch, len(world.prompt), jnp.int32), world.vocabulary)


def keys_of(count: int, *seed: int) -> Array:
    """[count] keys that no other numbers ``seed`` give: every walk of every run has its own."""
    (mixed,) = np.random.SeedSequence(seed).generate_state(1)
    return jax.random.split(jax.random.key(int(mixed)), count)


def propose(
    rows: Rows,
    shape: StaticTree,
    sampler: Sampler,
    state: Array,
    pending: Array,
    sampling: Sampling,
    step: tuple[Array, Array],
) -> tuple[Tree, Array | None, Array]:
    """Draft a tree below every pending token: trees, q [B, N, V] and the states of rows [B, N].

    Rows past ``shape`` are inactive. q is that of the drafter's rows whatever the proposals, None
    if the rule does not read it. One loop over the levels: a program as small as that of a chain.
    """
    plain, proposals, size = head_sampling({}, sampling), sampler.proposals, rows.target.shape[1]
    inner, children, slots = (jnp.asarray(x) for x in _levels(shape, proposals))
    batch, capacity, width = len(pending), shape.capacity + SPARE, children.shape[2]
    even = jnp.full((batch, capacity, size), 1 / size, jnp.float32)
    tokens = jnp.full((batch, capacity), -1, jnp.int32).at[:, 0].set(pending)
    states = jnp.zeros((batch, capacity), jnp.int32).at[:, 0].set(state)

    def level(depth: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tokens, states, q = carry
        here, below = inner[depth], children[depth]
        logits = rows.draft[states[:, here]]
        if proposals in DRAWN:
            columns, own = drawn(logits, plain, step, slots[depth], proposals == "iid")
        else:
            at = step[0], step[1] + depth  # as for children of the root of a later step
            g = target_noise({}, plain, at, 0, size) if proposals == "coupled" else None
            columns = ranked(logits, plain, g, width)
            own = jax.nn.softmax(jax.vmap(process)(logits, plain), axis=-1)
        reached = rows.after[states[:, here][:, :, None], columns]
        place = below.reshape(-1)
        tokens = tokens.at[:, place].set(columns.reshape(batch, -1))
        states = states.at[:, place].set(reached.reshape(batch, -1))
        return tokens, states, q.at[:, here].set(own)

    tokens, states, q = lax.fori_loop(0, len(inner), level, (tokens, states, even))
    tree = shape.full(tokens[:, : shape.capacity]).pad(capacity)
    q = q.at[:, shape.capacity :].set(1 / size)  # where levels wrote what belongs to no row
    return tree, q if sampler.rule.needs_q else None, states[:, : shape.capacity]


def _levels(shape: StaticTree, proposals: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with children by depth [D, m], their children [D, m, w], and slots of noise [D, m, w].

    What is missing stands in the last spare row, which nothing reads.
    """
    by_depth = [
        [v for v in range(shape.capacity) if shape.depths[v] == depth and shape.children(v)]
        for depth in range(shape.max_depth)
    ]
    most, nowhere = max(map(len, by_depth)), shape.capacity + SPARE - 1
    width = max(len(shape.children(v)) for level in by_depth for v in level)
    inner = np.full((len(by_depth), most), nowhere, np.int32)
    children = np.full((len(by_depth), most, width), nowhere, np.int32)
    for depth, level in enumerate(by_depth):
        for at, v in enumerate(level):
            inner[depth, at] = v
            children[depth, at, : len(shape.children(v))] = shape.children(v)
    # Independent draws have a slot each; those without replacement come from one of their parent.
    slots = children if proposals == "iid" else np.broadcast_to(inner[:, :, None], children.shape)
    return inner, children, slots


def target_rows(rows: Rows, states: Array) -> Array:
    """[B, N, V] logits of rows in ``states`` and, past them, poison: all on one token."""
    batch, size = states.shape[0], rows.target.shape[1]
    poison = jnp.zeros((batch, SPARE, size), jnp.float32).at[:, :, 0].set(POISON)
    return jnp.concatenate([rows.target[states], poison], axis=1)


class _Going(struct.PyTreeNode):
    """What goes from step to step; tokens [B, L], made [B], state [B], pending [B], length [B]."""

    tokens: Array
    made: Array
    state: Array
    pending: Array
    length: Array
    history: History | None


@functools.partial(jax.jit, static_argnames=("sampler", "shape", "count", "steps"))
def walk_batch(
    sampler: Sampler,
    shape: StaticTree,
    count: int,
    steps: int,
    rows: Rows,
    start: tuple[Array, Array],
    sampling: Sampling,
    keys: Array,
    length: Array,
    history: History | None,
) -> tuple[Array, Array]:
    """[B, count] tokens of as many walks as keys, and how many candidates were accepted a step.

    ``steps`` steps are taken with trees; plain draws finish what is still open. ``start``: the
    states and tokens [B] of the roots. A token that is no token of the world stays as it is.
    """
    batch, last = keys.shape[0], rows.target.shape[1] - 1
    index = jnp.arange(batch)[:, None]

    def put_out(going: _Going, tokens: Array, emitted: Array) -> _Going:
        """Add the first ``emitted`` [B] of ``tokens`` [B, P]."""
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        real = column < emitted[:, None]
        place = jnp.where(real, going.made[:, None] + column, count)
        state, pending = going.state, going.pending
        history = going.history
        if history is not None:
            consumed = jnp.concatenate([pending[:, None], tokens[:, :-1]], axis=1)
            history = extend(history, consumed, emitted)
        for i in range(tokens.shape[1]):
            moved = rows.after[state, jnp.clip(tokens[:, i], 0, last)]
            state = jnp.where(real[:, i], moved, state)
            pending = jnp.where(real[:, i], tokens[:, i], pending)
        return _Going(
            tokens=going.tokens.at[index, place].set(tokens, mode="drop"),
            made=going.made + emitted,
            state=state,
            pending=pending,
            length=going.length + emitted,
            history=history,
        )

    def tree_step(_, carry: tuple[_Going, Array]) -> tuple[_Going, Array]:
        going, accepted = carry
        own, own_keys, position = per_sequence(batch, sampling, keys, going.length, last + 1)
        assert own_keys is not None and position is not None
        step = own_keys, position
        tree, q, states = propose(rows, shape, sampler, going.state, going.pending, own, step)
        logits = target_rows(rows, states)
        given = Given(tree, q, logits, own, own_keys, position, going.history)
        choice = sampler.choose(given)
        tokens, emitted = choice.emitted(sampler.tree(given))
        return put_out(going, tokens, emitted), accepted + (emitted - 1).sum()

    def plain_step(going: _Going) -> _Going:
        history = going.history
        if history is not None:
            one = jnp.ones(batch, jnp.int32)
            history = extend(history, going.pending[:, None], one)
        token = sample(
            rows.target[going.state],
            sampling=sampling,
            key=keys,
            position=going.length + 1,
            history=history,
        )
        return put_out(going, token[:, None], jnp.ones(batch, jnp.int32))

    going = _Going(
        tokens=jnp.full((batch, count), -1, jnp.int32),
        made=jnp.zeros(batch, jnp.int32),
        state=start[0],
        pending=start[1],
        length=length,
        history=history,
    )
    accepted = jnp.int32(0)
    if steps:  # static: plain draws alone compile sooner
        going, accepted = lax.fori_loop(0, steps, tree_step, (going, accepted))
    going = lax.while_loop(lambda going: (going.made < count).any(), plain_step, going)
    return going.tokens, accepted


def take_walks(world: World, sampler: Sampler, keys: Array) -> tuple[np.ndarray, float]:
    """[W, L] tokens of a walk for each of W keys, and accepted candidates a tree step."""
    count = keys.shape[0]
    chunk = min(CHUNK, count)
    shape = world.shape(sampler.rule.chains_only)
    sampling = world.sampling.prepared(world.vocabulary)
    lengths = jnp.full(chunk, len(world.prompt), jnp.int32)
    history = history_of(world, sampling, chunk)
    start = tuple(jnp.full(chunk, value, jnp.int32) for value in (world.start, world.root))
    rows, found, accepted = rows_of(world), [], 0
    settings: tuple[Any, ...] = (sampler, shape, world.length, world.steps, rows, start, sampling)
    for first in range(0, count, chunk):
        part = keys[first : first + chunk]
        spare = chunk - len(part)
        # One program serves every part: the last is filled up, and its surplus left out below.
        part = jnp.concatenate([part, keys[:spare]]) if spare else part
        tokens, kept = walk_batch(*settings, part, lengths, history)
        found.append(np.asarray(tokens)[: chunk - spare])
        accepted += int(kept)
    taken = max(1, len(found) * chunk * world.steps)
    return np.concatenate(found), accepted / taken


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One G-test: ``kind`` "conditional" or "joint", what it was of, and its p-value."""

    kind: str
    of: str
    g: float
    freedom: int
    p: float


def g_tests(tokens: np.ndarray, joint: np.ndarray, vocabulary: int) -> list[Outcome]:
    """Every G-test of walks [W, L] against the law [V ** L] of their tokens.

    Conditional: the next token after each context that VISITS walks visit. Joint: each three
    tokens in a row, and all together.
    """
    walks, length = tokens.shape
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        return [Outcome("joint", "tokens outside the vocabulary", np.inf, 0, 0.0)]
    found = []
    for place in range(length):
        code = tokens[:, : place + 1] @ vocabulary ** np.arange(place, -1, -1)
        counts = np.bincount(code, minlength=vocabulary ** (place + 1)).reshape(-1, vocabulary)
        law = joint.reshape(vocabulary ** (place + 1), -1).sum(axis=1).reshape(-1, vocabulary)
        for context in np.flatnonzero(counts.sum(axis=1) >= VISITS):
            total = law[context].sum()
            if total > 0:  # a context that cannot be is seen where its last token was drawn
                name = np.base_repr(int(context), vocabulary).zfill(place) if place else "root"
                found.append(
                    Outcome("conditional", name, *g_test(counts[context], law[context] / total))
                )
    cube = joint.reshape((vocabulary,) * length)
    for first in range(length - 2):
        others = tuple(axis for axis in range(length) if not first <= axis < first + 3)
        code = tokens[:, first : first + 3] @ vocabulary ** np.arange(2, -1, -1)
        counts = np.bincount(code, minlength=vocabulary**3)
        name = f"tokens {first + 1} to {first + 3}"
        found.append(Outcome("joint", name, *g_test(counts, cube.sum(axis=others).ravel())))
    code = tokens @ vocabulary ** np.arange(length - 1, -1, -1)
    counts = np.bincount(code, minlength=vocabulary**length)
    found.append(Outcome("joint", f"all {length} tokens", *g_test(counts, joint)))
    return found
