"""Decide which path of a verified tree is emitted, and the token that follows it.

A rule of ``steps.rules`` looks at one sequence; ``select`` maps it over the batch.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from treejax.history import History
from treejax.sampling import GREEDY, Sampling, needed_history, per_sequence
from treejax.shapes import Array
from treejax.steps.choice import Choice
from treejax.steps.rules import REGISTRY, named
from treejax.steps.rules.base import Rule
from treejax.steps.rules.match import walk
from treejax.tree import Tree

__all__ = ["Choice", "select", "walk"]


def select(
    tree: Tree,
    logits: Array,
    *,
    sampling: Sampling = GREEDY,
    key: Array | None = None,
    position: Any = None,
    history: History | None = None,
    rule: str | Rule = "match",
    q: Array | None = None,
) -> Choice:
    """Choose a path of every tree of the batch; usable alone and inside jit.

    Args:
      tree: the verified tree.
      logits: [B, N, V] target logits of its rows, any float type; computed with in float32.
      sampling: the settings.
      key: one typed key (folded with the row), or [B] keys; needed when sampling.
      position: ``state.length``, an integer or [B]; needed when sampling. A node of depth d draws
        the token at absolute position ``position + 1 + d``.
      history: what each sequence holds before its pending token; needed by penalties and
        ``min_tokens``. Each row's context is that and the tokens from the root to it.
      rule: a name in ``steps.rules.REGISTRY``, or a rule with its settings. Whether it is right
        for the way in which candidates came about cannot be seen here: ``rules.rule_for`` asks.
      q: [B, N, V] probabilities that the candidates were drawn with, row v for the children of v;
        for the rules that read them, and for no other.

    Raises:
      ValueError: an unknown rule, wrong shapes, a setting out of range, key, position, history or
        q missing, q given to a rule that does not read it.
    """
    rule = named(rule)
    logits = jnp.asarray(logits)
    if logits.ndim != 3 or logits.shape[:2] != tree.tokens.shape:
        raise ValueError(
            f"logits have shape {logits.shape}, expected (B, N, V) with the tree's (B, N) = "
            f"{tree.tokens.shape}"
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits are of type {logits.dtype}, expected a float type")
    q = _checked(rule, q, logits)
    batch, _, vocabulary = logits.shape
    sampling, keys, position = per_sequence(batch, sampling, key, position, vocabulary)
    history = needed_history(sampling, history, (batch, vocabulary))
    return _select(tree, logits, sampling, keys, position, history, q, rule=rule)


def _checked(rule: Rule, q: Any, logits: Array) -> Array | None:
    """q as the rule needs it."""
    if not rule.needs_q:
        if q is not None:
            readers = ", ".join(name for name, other in REGISTRY.items() if other.needs_q)
            raise ValueError(
                f"rule {rule.name!r} does not read q: leave it out, or use one of: {readers}"
            )
        return None
    if q is None:
        raise ValueError(
            f"rule {rule.name!r} needs q, the probabilities that the candidates were drawn with: "
            "pass q=, or use rule 'match'"
        )
    q = jnp.asarray(q)
    if q.shape != logits.shape or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q has shape {q.shape} and type {q.dtype}, expected floats of the logits' shape "
            f"{logits.shape}"
        )
    return q


@partial(jax.jit, static_argnames="rule")
def _select(
    tree: Tree,
    logits: Array,
    sampling: Sampling,
    keys: Array | None,
    position: Array | None,
    history: History | None,
    q: Array | None,
    rule: Rule,
) -> Choice:
    return jax.vmap(rule.choose)(tree, logits, sampling, keys, position, history, q)
