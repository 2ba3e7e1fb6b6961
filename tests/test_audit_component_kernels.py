"""The component audit of kernels, interpreted on a CPU."""

import pytest

from treejax.audit.component.operands import Shape
from treejax.audit.component.rig import Rig
from treejax.audit.component.rules import promise_of
from treejax.audit.component.steps import Journey, travel
from treejax.policies import REGISTRY


@pytest.mark.parametrize("name", ["replay", "wy"])
def test_kernels_are_audited_on_a_cpu(name):
    """The interpreted kernels over five steps, against decoding by the kernels themselves."""
    shape = Shape(1, 2, key_heads=1, value_heads=1, key_dim=8, value_dim=8, rows=8, depth=3)
    rig = Rig(REGISTRY[name](implementation="interpret"))
    journey = Journey.of(shape, 3, 5, rig.native())
    seen, promise = travel(rig, journey), promise_of(rig.policy)
    assert (seen.moved, seen.idle) == (0, 5)
    for i, rule in enumerate((promise.outputs, promise.states)):
        assert rule.passes(seen.made[i], seen.decoded[i]).all()
        assert (seen.bits[i] == seen.count[i]) == (name == "replay")
