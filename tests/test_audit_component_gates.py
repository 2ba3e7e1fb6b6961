"""Field case FC-07 at the component audit: gates that verify, decode and commit multiply by."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treejax import layers
from treejax.audit.component.block import Case
from treejax.audit.component.operands import Drawn, Shape
from treejax.audit.component.rig import Rig, pack
from treejax.audit.component.rules import promise_of
from treejax.audit.component.truth import along, errors, exact
from treejax.policies import REGISTRY, make_policy
from treejax.tree import Tree

ONE = Shape(1, 3, key_heads=1, value_heads=2, key_dim=8, value_dim=8, rows=8, depth=3)


@pytest.mark.parametrize("name", REGISTRY)
def test_fc07_gates_are_float32_in_verify_decode_and_commit(name):
    """FC-07: sigmoid(-0.5) = 0.3775407 and exp(2.7) = 14.87973 are what all three multiply by,
    and a round trip through bfloat16 in publishing alone is outside the rule."""
    case = gates(jnp.float32)
    rig = Rig(make_policy(name, "xla"))
    carry = rig.init(jnp.asarray(case.R), 1)
    tree = Tree.root_only(jnp.zeros(3, jnp.int32), 8, 3)
    path = pack([[0]] * 3, 3)
    right = rig.verify(carry, case.drawn.layers(), tree)
    decoded = rig.native()(case.R, tuple(x[:, :, 0] for x in dataclasses.astuple(case.drawn)))
    wanted = np.array([0.3775407, np.exp(-0.01 * 14.87973)])  # a write, a decay
    for outputs, states in (
        (right.outputs[:, :, 0], rig.states(rig.publish(right, path))),
        decoded,
    ):
        np.testing.assert_allclose(outputs[0, :2, 0, 0], wanted, rtol=3e-7)
        np.testing.assert_allclose(states[0, :2, 0, 0, 0], wanted, rtol=3e-7)

    truth = along(case.R.astype(np.float64), [[-1]] * 3, case.drawn, exact).states[0]
    rule, given = promise_of(rig.policy).states, errors(decoded[1], truth, 3)
    wrong = rig.verify(carry, gates(jnp.bfloat16).drawn.layers(), tree)
    for verified, passes in ((right, True), (wrong, False)):
        made = errors(rig.states(rig.publish(verified, path)), truth, 3)
        assert (rule.passes(made, given)[:, :2] == passes).all()


@functools.cache
def gates(dtype):
    """First rows with the field case's gates, through ``dtype``: sequence 0 writes 1 onto nothing,
    sequence 1 decays 1."""
    shape = (ONE.layers, ONE.batch, ONE.rows, ONE.value_heads)
    a = jnp.full(shape, np.log(np.expm1(0.01)), jnp.float32)  # its softplus is 0.01
    A_log = jnp.full(shape[3:], 2.7, jnp.float32).astype(dtype).astype(jnp.float32)
    beta = jax.nn.sigmoid(jnp.full(shape, -0.5, jnp.float32)).astype(dtype).astype(jnp.float32)
    alpha, g = layers.decays(layers.log_decay(a, A_log, jnp.zeros(shape[3:])))
    unit = np.zeros((*shape[:3], 1, 8), np.float32)
    unit[..., 0] = 1.0
    v = np.repeat(unit, 2, axis=3)
    beta = np.array(beta)
    beta[:, 1] = 0.0
    R = np.zeros((*shape[:2], 2, 8, 8), np.float32)
    R[:, 1, :, 0, 0] = 1.0
    drawn = Drawn(unit, unit, v, np.asarray(g), np.asarray(alpha), beta)
    return Case(ONE, (0,), drawn, R)
