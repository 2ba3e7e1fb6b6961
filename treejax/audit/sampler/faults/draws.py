"""Faults in the draws that ``match`` follows down a tree."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from treejax.audit.sampler.faults.base import Given, one_by_one, shipped
from treejax.history import History, along_paths
from treejax.processing import first_argmax
from treejax.sampling import FINAL, TARGET, noise, process
from treejax.shapes import Array
from treejax.steps.choice import Choice
from treejax.steps.rules.base import Rule
from treejax.steps.rules.kin import kin_of
from treejax.steps.select import walk

Choose = Callable[[Rule, Given], Choice]


def _draw(
    given: Given,
    node: Array,
    at: Array,
    context: History | None,
    purpose: int = TARGET,
    slot: Array | int = 0,
) -> Array:
    """One draw from the row of ``node`` of one sequence, with the noise of position ``at``."""
    row = lax.dynamic_index_in_dim(given.logits, node, keepdims=False)
    weights = process(row, given.sampling, context)
    return first_argmax(weights + noise(given.keys, at, row.shape[0], purpose, slot))


def walked_with(place: Callable[[Array, Array], Array], says: str) -> Choose:
    """``match`` whose draw at a depth takes the noise of ``place(position, depth)``."""

    def choose(rule: Rule, given: Given) -> Choice:
        def one(given: Given) -> Choice:
            def draw_at(node: Array, depth: Array, context: History | None) -> Array:
                return _draw(given, node, place(given.position, depth), context)

            return walk(given.tree, draw_at, given.history)

        return one_by_one(one, given)

    choose.__doc__ = says
    return choose


same_key_everywhere = walked_with(
    lambda position, depth: jnp.zeros_like(position), "One key serves all positions."
)
same_key_at_all_depths = walked_with(
    lambda position, depth: position + 1, "One key serves all depths of a step."
)
same_keys_in_every_step = walked_with(
    lambda position, depth: 1 + depth, "The same keys serve every step."
)


def _with_last(back: int, purpose: int, says: str) -> Choose:
    """``match``, its last token drawn from the row ``back`` nodes above the end of the path."""

    def one(given: Given, choice: Choice) -> Choice:
        node = choice.path[jnp.maximum(choice.length - 1 - back, 0)]
        context = given.history
        if context is not None:
            ancestors = kin_of(given.tree).ancestors
            every = along_paths(context, given.tree.tokens, ancestors)
            context = jax.tree.map(lambda x: x[node], every)
        at = given.position + choice.length
        return choice.replace(pending=_draw(given, node, at, context, purpose))

    def choose(rule: Rule, given: Given) -> Choice:
        return jax.vmap(one)(given, shipped(rule, given))

    choose.__doc__ = says
    return choose


redrawn_after_mismatch = _with_last(0, FINAL, "After a mismatch the last token is drawn anew.")
drawn_at_parent = _with_last(1, TARGET, "The last token is drawn from the row above the right one.")


def drawn_per_path(rule: Rule, given: Given) -> Choice:
    """Every path has draws of its own, and the one that matches longest is kept."""

    def one(given: Given) -> Choice:
        tree, kin = given.tree, kin_of(given.tree)
        rows = jnp.arange(tree.tokens.shape[0], dtype=jnp.int32)

        def down(leaf: Array) -> Choice:
            on_path = kin.ancestors[leaf]
            own = tree.replace(tokens=jnp.where(on_path, tree.tokens, -1))

            def draw_at(node: Array, depth: Array, context: History | None) -> Array:
                return _draw(given, node, given.position + 1 + depth, context, slot=1 + leaf)

            root = own.tokens.at[0].set(tree.tokens[0])
            return walk(own.replace(tokens=root), draw_at, given.history)

        every = jax.vmap(down)(rows)
        inner = ((tree.parent[:, None] == rows[None, :]) & kin.active[:, None]).any(axis=0)
        longest = jnp.argmax(jnp.where(kin.active & ~inner, every.length, 0))
        return jax.tree.map(lambda x: x[longest], every)

    return one_by_one(one, given)
