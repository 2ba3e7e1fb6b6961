"""Small steps that several tests take: a choice by hand, one decoded token, surfaces compared."""

import jax.numpy as jnp
import numpy as np

from treejax.steps.publish import publish
from treejax.steps.select import Choice
from treejax.steps.verify import verify
from treejax.tree import Tree

DEFERRED = ("fused", "ring")
"""Policies that write a state while a later step is verified: what it stands for is then the same
but for rounding, not its bytes."""


def choose(paths, max_depth, pending=None):
    """A Choice of one path a sequence: a list of nodes from the root, empty to take no part."""
    nodes = np.full((len(paths), max_depth + 1), -1, np.int32)
    for b, path in enumerate(paths):
        nodes[b, : len(path)] = path
    lengths = jnp.array([len(path) for path in paths], jnp.int32)
    pending = jnp.zeros_like(lengths) if pending is None else jnp.array(pending, jnp.int32)
    return Choice(path=jnp.array(nodes), length=lengths, pending=pending)


def decode(model, state, tokens, active=None, capacity=1, max_depth=0):
    """One token a sequence by a root-only tree; inactive sequences stay as they are.

    A larger capacity and depth bound leave rows inactive and reuse the program of such trees.
    """
    active = [True] * state.batch if active is None else active
    tree = Tree.root_only(jnp.array(tokens, jnp.int32), capacity, max_depth)
    out, scratch = verify(model, state, tree)
    choice = choose([[0] if on else [] for on in active], max_depth)
    return out.logits[:, 0], publish(model, state, tree, scratch, choice)


class Surfaces:
    """R, C, K and V of every layer as NumPy arrays, read through the State's public functions."""

    def __init__(self, state, attention=True):
        config = state.config
        self.length = np.asarray(state.length)
        self.R = {i: np.asarray(state.recurrent_of(i)) for i in config.linear_layers}
        self.C = {i: np.asarray(state.conv_of(i)) for i in config.linear_layers}
        pairs = {i: state.kv_of(i) for i in config.full_layers if attention}
        self.K = {i: np.asarray(pair[0]) for i, pair in pairs.items()}
        self.V = {i: np.asarray(pair[1]) for i, pair in pairs.items()}

    def row(self, b):
        """One sequence: {name: array}, attention rows cut at its length."""
        made = {f"R{i}": a[b] for i, a in self.R.items()} | {
            f"C{i}": a[b] for i, a in self.C.items()
        }
        cut = int(self.length[b])
        made |= {f"K{i}": a[b, :cut] for i, a in self.K.items()}
        return made | {f"V{i}": a[b, :cut] for i, a in self.V.items()}


def oracle_row(cache):
    """The same names from an oracle ``Cache``."""
    made = {}
    for name in "RCKV":
        made |= {f"{name}{i}": array for i, array in getattr(cache, name).items()}
    return made


def relative(actual, expected):
    """Relative RMS distance of two arrays; 0 for two empty or two zero arrays."""
    expected = np.asarray(expected, np.float64)
    difference = np.linalg.norm(np.asarray(actual, np.float64) - expected)
    return 0.0 if difference == 0 else difference / np.linalg.norm(expected)


def assert_consistent(row, expected, tolerance):
    """Every surface of one sequence within a relative RMS ``tolerance`` of what it should be."""
    assert row.keys() == expected.keys()
    for name, array in expected.items():
        assert row[name].shape == array.shape, name
        assert relative(row[name], array) < tolerance, name
