"""The mathematics of tree verification in float64 NumPy, one node at a time.

Written from the formulas and importing nothing of the package, so that the two can only agree by
both being right. A node's parent is looked up by id; no packing order is assumed, and every
function is a plain loop over nodes. Recurrent states are R[Hv, dv, dk], value rows by key columns.
"""

import numpy as np


def depth_of(parents, node):
    """Edges between ``node`` and the root; the root's parent is -1."""
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


def path_to(parents, node):
    """Node ids from the root down to ``node``, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def parents_first(parents):
    """Node ids in an order in which every parent precedes its children."""
    return sorted(range(len(parents)), key=lambda node: depth_of(parents, node))


def unit(x):
    """L2 normalisation as the family does it: the 1e-6 stands inside the root."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    shifted = np.exp(x - np.max(x, -1, keepdims=True))
    return shifted / np.sum(shifted, -1, keepdims=True)


def update(R, q, k, v, alpha, beta):
    """One node of one value head: decay, error, write, read.

    R [dv, dk]; q, k [dk], normalised (q also scaled); v [dv]; scalars alpha = exp(g) and beta.
    Returns the node's output [dv] and its state [dv, dk].
    """
    decayed = alpha * R
    pseudo_value = beta * (v - decayed @ k)
    written = decayed + np.outer(pseudo_value, k)
    return written @ q, written


def delta_rule_tree(R0, parents, q, k, v, g, beta):
    """The gated delta rule over a tree; each node continues its parent, node 0 continues R0.

    R0 [Hv, dv, dk]; q, k [n, Hk, dk] normalised (q also scaled); v [n, Hv, dv]; g, beta [n, Hv].
    Value head h reads key head h // (Hv / Hk). Returns outputs [n, Hv, dv], states [n, Hv, dv, dk].
    """
    R0, q, k, v, g, beta = (np.asarray(x, np.float64) for x in (R0, q, k, v, g, beta))
    heads, ratio = v.shape[1], v.shape[1] // k.shape[1]
    outputs, states = np.zeros(v.shape), np.zeros((len(v), *R0.shape))
    for node in parents_first(parents):
        before = R0 if parents[node] < 0 else states[parents[node]]
        for h in range(heads):
            outputs[node, h], states[node, h] = update(
                before[h], q[node, h // ratio], k[node, h // ratio], v[node, h],
                np.exp(g[node, h]), beta[node, h],
            )  # fmt: skip
    return outputs, states


def chain(length):
    """Parents of a plain sequence of ``length`` nodes."""
    return list(range(-1, length - 1))


def delta_rule(R0, q, k, v, g, beta):
    """The rule over a sequence: outputs [T, Hv, dv] and the state after the last token."""
    if not len(v):
        return np.zeros(v.shape), np.asarray(R0, np.float64)
    outputs, states = delta_rule_tree(R0, chain(len(v)), q, k, v, g, beta)
    return outputs, states[-1]


def windows_tree(history, parents, inputs):
    """What each node's convolution reads: [n, K, C], the node's own input last.

    history [K - 1, C] are the inputs before the root, oldest first; inputs [n, C].
    """
    width = len(history) + 1
    rows = []
    for node in range(len(inputs)):
        line = list(history) + [inputs[j] for j in path_to(parents, node)]
        rows.append(line[-width:])
    return np.asarray(rows, np.float64)


def convolve_tree(history, parents, inputs, weight):
    """Causal depthwise convolution with silu along each node's path.

    weight [K, C]; its last tap meets the node's own input.
    """
    windows = windows_tree(history, parents, inputs)
    return silu(np.einsum("nkc,kc->nc", windows, np.asarray(weight, np.float64)))


def history_after(history, parents, inputs, node):
    """The K - 1 inputs that a child of ``node`` sees before its own, oldest first."""
    return windows_tree(history, parents, inputs)[node][1:]


def attend_tree(q, k, v, parents, keys, values):
    """Softmax attention of each node over the prefix, its ancestors and itself.

    q [n, Hq, D]; k, v [n, Hkv, D]; keys, values [S, Hkv, D], the committed prefix.
    """
    q, k, v, keys, values = (np.asarray(x, np.float64) for x in (q, k, v, keys, values))
    nodes, heads, width = q.shape
    ratio = heads // k.shape[1]
    out = np.zeros(q.shape)
    for node in range(nodes):
        path = path_to(parents, node)
        for h in range(heads):
            seen_k = np.concatenate([keys[:, h // ratio], k[path, h // ratio]])
            seen_v = np.concatenate([values[:, h // ratio], v[path, h // ratio]])
            out[node, h] = softmax(seen_k @ q[node, h] * width**-0.5) @ seen_v
    return out
