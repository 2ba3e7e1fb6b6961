"""The optimizer against optax's own Muon and Adam leaf by leaf, and the learning-rate schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax import contrib

from treejax.training.optimizer import OptimizerSettings, learning_rate, make_optimizer


@pytest.mark.standard_promotion
def test_optimizer_equals_muon_and_adam_leaf_by_leaf():
    """Stacking equal shapes and transposing tall ones changes nothing but the rounding."""
    random = np.random.default_rng(0)

    def draw(shape):
        return random.standard_normal(shape).astype(np.float32)

    shapes = {"up": (6, 10), "down": (10, 6), "experts": (2, 6, 10), "embed": (12, 6), "norm": (6,)}
    params = {name: draw(shape) for name, shape in shapes.items()}
    made = OptimizerSettings(clip=1e9)
    optimizer = make_optimizer(made)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    matrices = {
        "up": params["up"],
        "down": params["down"],
        "first": params["experts"][0],
        "second": params["experts"][1],
    }
    dims = jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), matrices)
    reference = contrib.scale_by_muon(beta=made.muon_momentum, weight_dimension_numbers=dims)
    reference_state, reference_update = reference.init(matrices), jax.jit(reference.update)
    for _ in range(2):
        grads = {name: draw(shape) for name, shape in shapes.items()}
        updates, state = update(grads, state, params)
        expected, reference_state = reference_update(
            {
                "up": grads["up"],
                "down": grads["down"],
                "first": grads["experts"][0],
                "second": grads["experts"][1],
            },
            reference_state,
        )
    got = updates | {"first": updates["experts"][0], "second": updates["experts"][1]}
    for name, leaf in matrices.items():
        wanted = 0.2 * 10**0.5 * expected[name] + 0.1 * leaf
        # Newton-Schulz amplifies float32 rounding by a few steps of slope 3.4.
        np.testing.assert_allclose(got[name], wanted, rtol=2e-4, atol=2e-4)
    # Adam's second step on two random gradients; norms do not decay, tables do.
    assert float(jnp.abs(updates["norm"]).max()) <= 1.01
    rest = updates["embed"] - 0.1 * params["embed"]
    assert float(jnp.abs(rest).max()) <= 1.01


@pytest.mark.standard_promotion
def test_optimizer_clips_the_global_norm():
    params = {"norm": jnp.zeros(4), "up": jnp.zeros((3, 4))}
    grads = {"norm": jnp.full(4, 1e3), "up": jnp.full((3, 4), 1e3)}
    optimizer = make_optimizer(OptimizerSettings())
    _, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
    # 16 equal numbers of norm 1 are 0.25 each; the first moment keeps a tenth of it.
    np.testing.assert_allclose(moments[0], 0.025, rtol=1e-5)


def test_schedule_warms_up_and_ends_at_one_percent():
    made = OptimizerSettings(learning_rate=1.0)
    assert learning_rate(made, 0, None, 10) == pytest.approx(0.1)
    assert learning_rate(made, 500, None, 10) == 1.0
    assert learning_rate(made, 500, 1000, 10) == pytest.approx(0.505)
    assert learning_rate(made, 1000, 1000, 10) == pytest.approx(0.01)
