"""The recurrence in float64 NumPy, one node at a time, and what it says about a case.

Written from the formulas and using nothing of the kernels. States are R [Hv, dv, dk].
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from pallas_kernels.bench.cases import Case, conv_rows
from pallas_kernels.bench.traffic import CONV_WIDTH

Rows = tuple[np.ndarray, ...]
"""q, k, v, g, beta of a sequence, float64 [N, heads, ...]."""


def recurrence(
    R0: np.ndarray, parents: Sequence[int], rows: Rows, wanted: Iterable[int]
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Outputs [n, Hv, dv] of a tree packed parents first, and the states of the wanted nodes.

    Value head h reads key head h // ratio.
    """
    q, k, v, g, beta = rows
    ratio = v.shape[1] // k.shape[1]
    q, k = np.repeat(q, ratio, 1), np.repeat(k, ratio, 1)
    outputs, states = np.zeros((len(parents), *v.shape[1:])), {}
    last_child = {parent: node for node, parent in enumerate(parents)}
    wanted = set(wanted)
    for node, parent in enumerate(parents):
        before = R0 if parent < 0 else states[parent]
        decayed = np.exp(g[node])[:, None, None] * before
        error = v[node] - (decayed @ k[node][:, :, None])[:, :, 0]
        u = beta[node][:, None] * error
        states[node] = decayed + u[:, :, None] * k[node][:, None, :]
        outputs[node] = (states[node] @ q[node][:, :, None])[:, :, 0]
        if parent >= 0 and last_child[parent] == node and parent not in wanted:
            del states[parent]
    return outputs, {node: states[node] for node in wanted}


def committed(R: np.ndarray, k: np.ndarray, u: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The state after writing the pseudo-values of a path, first to last."""
    ratio = u.shape[1] // k.shape[1]
    for key, value, decay in zip(np.repeat(k, ratio, 1), u, g, strict=True):
        R = np.exp(decay)[:, None, None] * R + value[:, :, None] * key[:, None, :]
    return R


def exact(x: jax.Array) -> np.ndarray:
    """The values of an array, in float64."""
    return np.asarray(x).astype(np.float64)


class Truth:
    """Float64 results of a case at a few places (layer, sequence), each computed once."""

    def __init__(self, case: Case):
        self.case = case
        layers, rows = len(case.layers), case.batch
        self.layers = sorted({0, layers // 2, layers - 1})
        self.rows = sorted({0, rows // 2, rows - 1})
        self.tree = functools.cache(self._tree)
        self.after = functools.cache(self._after)
        self.published = functools.cache(self._published)
        self.conv = functools.cache(self._conv)

    def nodes(self) -> set[int]:
        """Nodes whose states are compared: where publishing ends, and some ends of paths."""
        tree = self.case.tree
        return {tree.published[-1], *(path[-1] for path in tree.leaf_paths[:3])}

    def operands(self, layer: int, row: int) -> Rows:
        x = self.case.layers[layer]
        return tuple(exact(y[row]) for y in (x.q, x.k, x.v, x.g, x.beta))

    def _tree(self, layer: int, row: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        R0 = exact(self.case.pool[layer, row])
        return recurrence(R0, self.case.tree.parents, self.operands(layer, row), self.nodes())

    def _published(self, layer: int, row: int) -> np.ndarray:
        """The state after the case's factors."""
        path = len(self.case.tree.published)
        k, u, g = (exact(x[layer, row])[:path] for x in self.case.factors)
        return committed(exact(self.case.pool[layer, row]), k, u, g)

    def _after(self, layer: int, row: int) -> np.ndarray:
        """Outputs of the tree from the state after the factors."""
        operands = self.operands(layer, row)
        return recurrence(self.published(layer, row), self.case.tree.parents, operands, ())[0]

    def _conv(self, layer: int, row: int) -> dict[str, np.ndarray]:
        case = self.case
        layers, history, _ = case.conv
        x, size = layers[layer], case.tree.size
        dtype = x.inputs.dtype
        before = np.concatenate([exact(history[layer, row]), exact(x.inputs[row])])
        windows = before[conv_rows(case.tree)[:size]]  # [n, K, C]
        mixed = sum(windows[:, i] * exact(x.taps[i]) for i in range(CONV_WIDTH))
        mixed = mixed / (1.0 + np.exp(-mixed))
        mixed = mixed.astype(np.float32).astype(dtype).astype(np.float64)
        heads, width = case.settings.key_heads, case.settings.key_dim
        q, k, v = np.split(mixed, [heads * width, 2 * heads * width], 1)
        a, b = exact(x.a[row])[:size], exact(x.b[row])[:size]
        g = -np.exp(exact(x.A_log)) * np.logaddexp(0.0, a + exact(x.dt_bias))
        return {
            "q": _unit(q.reshape(size, heads, width)) * width**-0.5,
            "k": _unit(k.reshape(size, heads, width)),
            "v": v.reshape(size, case.settings.value_heads, case.settings.value_dim),
            "g": g,
            "alpha": np.exp(g),
            "beta": 1.0 / (1.0 + np.exp(-b)),
        }


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)
