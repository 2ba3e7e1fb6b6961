"""Faults in what a rule is shown: rows, settings, proposals, histories, padding."""

import jax
import jax.numpy as jnp

from treejax.audit.sampler.faults.base import Given
from treejax.history import along_paths
from treejax.sampling import adjust
from treejax.shapes import Array
from treejax.tree import describe


def neighbours_row(given: Given) -> Given:
    """Every row's logits are those of the next row in the packing."""
    size = given.tree.size[:, None]
    rows = (jnp.arange(given.logits.shape[1])[None, :] + 1) % size
    logits = jnp.take_along_axis(given.logits, rows[:, :, None], axis=1)
    return given.replace(logits=logits)


def _temperature(given: Given, temperature: Array) -> Given:
    return given.replace(sampling=given.sampling.replace(temperature=temperature))


def temperature_on_q_only(given: Given) -> Given:
    """The target's rows are read at temperature 1."""
    return _temperature(given, jnp.ones_like(given.sampling.temperature))


def temperature_on_p_only(given: Given) -> Given:
    """Candidates are drawn at the temperature, and q is reported at temperature 1."""
    power = _q(given) ** given.sampling.temperature[:, None, None]
    return given.replace(q=power / power.sum(axis=-1, keepdims=True))


def temperature_twice(given: Given) -> Given:
    """The target's logits are divided by the temperature two times."""
    return _temperature(given, given.sampling.temperature**2)


def soft_q(given: Given) -> Given:
    """A soft q goes with candidates that were ranked; the rule is told nothing else wrong."""
    return given


def _q(given: Given) -> Array:
    assert given.q is not None
    return given.q


def _own_q(given: Given) -> Array:
    """[B, N] probability with which each row's token was drawn."""
    above, tokens = jnp.maximum(given.tree.parent, 0), jnp.maximum(given.tree.tokens, 0)
    rows = jnp.take_along_axis(_q(given), above[:, :, None], axis=1)
    return jnp.take_along_axis(rows, tokens[:, :, None], axis=2)[:, :, 0]


def pruned_by_q(given: Given) -> Given:
    """A drawn candidate is dropped, with all below it, where its own q is low."""
    tree, own = given.tree, _own_q(given)
    likely = (own >= 0.25) | (tree.parent < 0)
    kept = (likely[:, None, :] | ~describe(tree).ancestors).all(axis=2)
    return _kept(given, kept)


def better_sibling_kept(given: Given) -> Given:
    """Of the drawn children of a node only the one of highest q is kept."""
    tree, own = given.tree, _own_q(given)
    real = jnp.arange(tree.capacity)[None, :] < tree.size[:, None]
    siblings = (tree.parent[:, :, None] == tree.parent[:, None, :]) & real[:, None, :]
    earlier = jnp.arange(tree.capacity)[None, :] < jnp.arange(tree.capacity)[:, None]
    better = (own[:, None, :] > own[:, :, None]) | (
        (own[:, None, :] == own[:, :, None]) & earlier[None]
    )
    best = ~(siblings & better).any(axis=2) | (tree.parent < 0)
    kept = (best[:, None, :] | ~describe(tree).ancestors).all(axis=2)
    return _kept(given, kept)


def _kept(given: Given, mask: Array) -> Given:
    """Rows of the tree where ``mask`` [B, N], with their logits and q."""
    tree, order = given.tree.keep_with_order(mask)

    def moved(values: Array) -> Array:
        return jnp.take_along_axis(values, order[:, :, None], axis=1)

    return given.replace(tree=tree, logits=moved(given.logits), q=moved(_q(given)))


def ties_cut(given: Given) -> Given:
    """Top-k keeps exactly k tokens where plain decoding keeps all that tie."""
    return given.replace(sampling=given.sampling.replace(exact_top_k=True))


def history_without_path(given: Given) -> Given:
    """Every row is penalised by what is committed, without the candidates above it."""
    tree, sampling = given.tree, given.sampling

    def one(logits: Array, history, tokens: Array, settings) -> Array:
        rows = tokens.shape[0]
        root = jnp.zeros((rows, rows), bool).at[:, 0].set(True)
        return adjust(logits, settings, along_paths(history, tokens, root))

    logits = jax.vmap(one)(given.logits, given.history, tree.tokens, sampling)
    bare = sampling.replace(
        logit_bias=None,
        repetition_penalty=None,
        presence_penalty=None,
        frequency_penalty=None,
        min_tokens=None,
        end_tokens=None,
    )
    return given.replace(logits=logits, sampling=bare, history=None)


def least_tokens_ignored(given: Given) -> Given:
    """End tokens may come at any time."""
    return given.replace(sampling=given.sampling.replace(min_tokens=None, end_tokens=None))


def padding_matched(given: Given) -> Given:
    """Padding takes part below the root: its token -1 reads the last token's entries."""
    tree, last = given.tree, given.logits.shape[2] - 1
    pad = jnp.arange(tree.capacity)[None, :] >= tree.size[:, None]
    return given.replace(
        tree=tree.replace(
            tokens=jnp.where(pad, last, tree.tokens),
            parent=jnp.where(pad, 0, tree.parent),
            rank=jnp.where(pad, tree.capacity, tree.rank),
            size=jnp.full_like(tree.size, tree.capacity),
        )
    )
