"""Seeded operands for the gate, the timings and the tests: made with NumPy in float64.

``realistic`` has the decays of a trained Gated DeltaNet at initialisation (A uniform in 1..16, time
steps log-uniform in 1e-3..0.1). ``correlated`` is the hard case of the delta rule: keys that
overlap strongly, write strengths near 1 and hardly any decay, so that errors are not forgotten.
"""

import dataclasses

import numpy as np

KINDS = ("realistic", "correlated")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one layer's operands: batch, rows (nodes), heads and widths."""

    batch: int
    rows: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class Operands:
    """Float64 operands: q, k [B, N, Hk, dk]; v [B, N, Hv, dv]; g, beta [B, N, Hv]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    @property
    def alpha(self) -> np.ndarray:
        return np.exp(self.g)


def make_operands(shape: Shape, kind: str = "realistic", seed: int = 0) -> Operands:
    """Operands of one layer; another seed is another layer."""
    if kind not in KINDS:
        raise ValueError(f"operands {kind!r} are unknown, expected one of: {', '.join(KINDS)}")
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    rows = (shape.batch, shape.rows)
    heads, width = shape.key_heads, shape.key_dim
    k = rng.standard_normal((*rows, heads, width))
    beta_logit = 1.5 * rng.standard_normal((*rows, shape.value_heads))
    if kind == "correlated":
        k = 0.3 * k + 0.7 * rng.standard_normal((shape.batch, 1, heads, width))
        g = np.full((*rows, shape.value_heads), -1e-3)
        beta_logit = beta_logit + 3.0
    else:
        A = rng.uniform(1.0, 16.0, shape.value_heads)
        step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), shape.value_heads))
        bias = step + np.log(-np.expm1(-step))  # the inverse of softplus
        g = -A * np.log1p(np.exp(rng.standard_normal((*rows, shape.value_heads)) + bias))
    return Operands(
        q=_unit(rng.standard_normal((*rows, heads, width))) * width**-0.5,
        k=_unit(k),
        v=rng.standard_normal((*rows, shape.value_heads, shape.value_dim)),
        g=g,
        beta=1.0 / (1.0 + np.exp(-beta_logit)),
    )


def make_state(shape: Shape, layers: int, seed: int = 0) -> np.ndarray:
    """A pool of states [layers, B, Hv, dv, dk], float32."""
    rng = np.random.default_rng([seed, 7])
    size = (layers, shape.batch, shape.value_heads, shape.value_dim, shape.key_dim)
    return 0.3 * rng.standard_normal(size, dtype=np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
