"""step_cost where verify sorts and pads its rows, as it does for kernels, without running any.

A policy in plain JAX says that it runs on kernels, and verify's own kernels are replaced by what
they stand for. The tree is packed so that sorting moves rows.
"""

import dataclasses

import jax.numpy as jnp
import pytest
from test_ablation_step_cost_switches import SIZES, model

from treejax import layers
from treejax.ablation.step_cost_arms import RUN, make_step_arm
from treejax.ablation.step_cost_bench import Bench
from treejax.ablation.step_cost_gate import check
from treejax.ablation.step_cost_model import REFRAIN
from treejax.drafters import Scripted
from treejax.drafters.topologies import StaticTree
from treejax.policies import WY
from treejax.steps import verify as product

ODD = StaticTree("odd", (-1, 0, 1, 2, 0, 4, 0))  # depths 0 1 2 3 1 2 1
ROWS, CONTEXT = 40, 16


@dataclasses.dataclass(frozen=True)
class Sorted(WY):
    """The wy policy, which takes any order of rows, where verify believes in kernels."""

    implementation: str = "kernels"
    lost: bool = False  # publishes the rows as the tree numbers them

    @property
    def _own(self):
        return WY()

    def scan(self, carry, layer, operands, plan):
        return self._own.scan(carry, layer, operands, plan)

    def commit(self, carry, scratch, path):
        if self.lost:
            path = path.replace(nodes=jnp.where(path.nodes > 0, path.nodes - 1, path.nodes))
        return self._own.commit(carry, scratch, path)


@pytest.fixture(scope="module", autouse=True)
def plain_kernels():
    """What verify's kernels compute, in plain JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            product,
            "_fused_operands",
            lambda state, windows: layers.by_convolution(product._convolution(state, windows)),
        )
        patch.setattr(product, "_split_attention", product._plain_attention)
        yield


def bench(name, policy=None):
    arm = make_step_arm(name, "replay", (2, 4), "xla", SIZES.config)
    if policy is not None:
        schedule = tuple((3, length - 1) for length in (2, 4) for _ in range(RUN))
        drafter = Scripted(ODD, truth=((REFRAIN,),), schedule=schedule)
        arm = dataclasses.replace(arm, policy=policy, drafter=drafter)
    return Bench(arm, model(), SIZES, 1, ROWS, 3)


@pytest.fixture(scope="module")
def plain():
    return bench("plain")


def test_what_is_verified_in_sorted_rows_is_replayed_from_them(plain):
    mine = bench("wy 2,2,1", Sorted())
    verdict = check(mine, plain, CONTEXT, phases=True)
    assert verdict.problem is None
    assert 0 < verdict.measures["native_error"] < 1e-6  # of 8 rows those that were verified
    mine.hold()
    mine.rewind(CONTEXT)
    place = mine.verify(mine.propose()).scratch.place
    assert place.tolist() == [[0, 1, 4, 6, 2, 5, 3]]


def test_a_path_in_other_rows_is_seen(plain):
    verdict = check(bench("wy 2,2,1", Sorted(lost=True)), plain, CONTEXT, phases=True)
    assert "native_error is" in verdict.problem and "state_error is" in verdict.problem
    assert "logits_error" not in verdict.problem  # verify itself is right


@pytest.mark.parametrize("switch", ["slots", "taps"])
def test_changes_are_undone_in_padded_rows_too(switch, plain):
    mine = bench(f"wy 2,2,1 no_{switch}", Sorted())
    assert check(mine, plain, CONTEXT, phases=False).problem is None
