"""The optimizer: Muon for the matrices, AdamW for everything else, one learning rate.

Muon (Jordan 2024; update scale 0.2 sqrt(max(in, out)) of Liu et al. 2025, arXiv 2502.16982) comes
from optax. Matrices of one shape are stacked first, tall ones transposed, so that a step runs a few
batched products instead of hundreds of small ones; orthogonalising is the same either way. The
learning rate is an argument of ``step``, because the schedule is only known once a step was timed.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from treejax.shapes import Array

NOT_MUON = ("embed", "lm_head", "conv", "a", "b", "router", "shared_gate")
"""Matrices by name that AdamW takes: tables, taps, and maps to a few gates."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Attributes are those of Muon and AdamW; ``decay`` is multiplied by the learning rate."""

    learning_rate: float = 4e-3
    muon_momentum: float = 0.95
    muon_steps: int = 5
    muon_scale: float = 0.2
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    decay: float = 0.1
    clip: float = 1.0


def _kind(path: tuple[Any, ...], leaf: Array) -> str:
    return "muon" if leaf.ndim >= 2 and path[-1].key not in NOT_MUON else "adam"


def _stack(tree: Any) -> dict[str, Array]:
    """Leaves [..., in, out] by shape, wide: {"320x704": [n, 320, 704], ...}."""
    groups: dict[str, list[Array]] = {}
    for leaf in jax.tree.leaves(tree):
        matrices = leaf.reshape(-1, *leaf.shape[-2:])
        if leaf.shape[-2] > leaf.shape[-1]:
            matrices = matrices.swapaxes(-1, -2)
        groups.setdefault("{}x{}".format(*matrices.shape[1:]), []).append(matrices)
    return {name: jnp.concatenate(group) for name, group in groups.items()}


def _unstack(groups: dict[str, Array], like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    taken = dict.fromkeys(groups, 0)
    made = []
    for leaf in leaves:
        tall = leaf.shape[-2] > leaf.shape[-1]
        name = "{}x{}".format(*sorted(leaf.shape[-2:]))
        count = leaf.size // (leaf.shape[-1] * leaf.shape[-2])
        matrices = groups[name][taken[name] : taken[name] + count]
        taken[name] += count
        made.append((matrices.swapaxes(-1, -2) if tall else matrices).reshape(leaf.shape))
    return jax.tree.unflatten(structure, made)


def stacked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` on the stacked matrices of a tree; its state is that of the stacks."""

    def init(params: Any) -> Any:
        return inner.init(_stack(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        made: Any
        made, state = inner.update(_stack(updates), state, None)
        return _unstack(made, updates), state

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Gradients to descent directions of size one learning rate (signs as in the gradients)."""

    def scale(update: Any, _: Any) -> Any:
        return update * (settings.muon_scale * max(update.shape[1:]) ** 0.5)

    def matrices(groups: Any) -> Any:  # [n, in, out]: n is the batch axis
        return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(1, 2), groups)

    muon = optax.chain(
        contrib.scale_by_muon(
            ns_steps=settings.muon_steps,
            beta=settings.muon_momentum,
            weight_dimension_numbers=matrices,
        ),
        optax.stateless_with_tree_map(scale),
    )
    adam = optax.chain(
        optax.scale_by_adam(settings.adam_b1, settings.adam_b2),
        optax.masked(
            optax.add_decayed_weights(settings.decay),
            lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        ),
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.partition(
            {
                "muon": optax.chain(stacked(muon), optax.add_decayed_weights(settings.decay)),
                "adam": adam,
            },
            lambda params: jax.tree_util.tree_map_with_path(_kind, params),
        ),
    )


def learning_rate(settings: OptimizerSettings, step: int, total: int | None, warmup: int) -> float:
    """Linear warm-up, then a cosine to 1 % at ``total`` steps (None: not known yet, no decay)."""
    rise = min(1.0, (step + 1) / warmup)
    done = 0.0 if total is None else min(1.0, step / total)
    return settings.learning_rate * rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
