"""Controls of the component audit: mistakes it must notice, and poison that must change nothing.

A scene is a verified second step, after a first one that published other paths. Each control
publishes it wrongly, one random strike a sequence, and what comes out is held against the truth of
the right paths, by the rules that gate for the policy. Detected is a strike whose sequence has a
cell that fails.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.component.operands import HYDRA, Drawn, Shape, draw, draw_states, path_to, plant
from treejax.audit.component.rig import Rig, Verified, pack
from treejax.audit.component.rules import Promise
from treejax.audit.component.truth import Nodes, Rule, Step, along, errors, exact, same_bits
from treejax.tree import Tree

SIBLINGS = {
    row: [other for other, above in enumerate(HYDRA) if above == parent and other != row]
    for row, parent in enumerate(HYDRA)
    if HYDRA.count(parent) > 1
}
LEAVES = [row for row in range(len(HYDRA)) if row not in HYDRA]


@dataclasses.dataclass(frozen=True)
class Scene:
    """Two steps over hydra27, the same for every policy of one implementation.

    Attributes:
      seed: of the strikes. first, second: operands of the steps.
      before, paths: what each sequence accepts in them.
      truth, decoded: outputs and states of every node of the second step.
    """

    shape: Shape
    seed: int
    R: np.ndarray
    first: Drawn
    second: Drawn
    before: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[int, ...], ...]
    truth: Nodes
    decoded: Nodes

    @classmethod
    def of(cls, shape: Shape, seed: int, step: Step) -> "Scene":
        """Paths of the second step end at nodes that have siblings, and differ from the first's
        in length, so that every mistake is one."""
        rng, batch = np.random.default_rng([seed, 17]), range(shape.batch)
        first, second = draw(shape, [seed, 18]), draw(shape, [seed, 19])
        paths = [path_to(HYDRA, int(rng.choice(list(SIBLINGS)))) for _ in batch]
        before = []
        for path in paths:
            others = [path_to(HYDRA, node) for node in range(len(HYDRA))]
            others = [other for other in others if len(other) != len(path)]
            before.append(others[int(rng.integers(len(others)))])
        R, trees, ends = draw_states(shape, [seed, 20]), [HYDRA] * shape.batch, np.array(batch)
        nodes = []
        for start, how in ((R.astype(np.float64), exact), (R, step)):
            states = along(start, trees, first, how).states
            last = np.array([path[-1] for path in before])
            start = np.ascontiguousarray(states[last, :, ends].swapaxes(0, 1))
            nodes.append(along(start, trees, second, how))
        made = tuple(map(tuple, before)), tuple(map(tuple, paths))
        return cls(shape, seed, R, first, second, *made, *nodes)

    def tree(self) -> Tree:
        return plant(self.shape, [HYDRA] * self.shape.batch)

    def start(self, rig: Rig) -> Any:
        """The carry after the first step."""
        carry = rig.init(jnp.asarray(self.R), self.shape.key_heads)
        verified = rig.verify(carry, self.first.layers(), self.tree())
        return rig.publish(verified, pack(self.before, self.shape.depth))

    def wrong_states(self, R: np.ndarray, rule: Rule) -> np.ndarray:
        """[L, B]: which states fail, as those after the scene's paths."""
        last, every = np.array([path[-1] for path in self.paths]), np.arange(self.shape.batch)
        exact_, native_ = (nodes.states[last, :, every] for nodes in (self.truth, self.decoded))
        made = R.swapaxes(0, 1)
        return ~rule.passes(errors(made, exact_, 3), errors(native_, exact_, 3)).T

    def wrong_outputs(self, outputs: np.ndarray, rule: Rule) -> np.ndarray:
        """[N, L, B]: which of the 28 rows' outputs fail."""
        count = len(HYDRA)
        truth, decoded = self.truth.outputs[:count], self.decoded.outputs[:count]
        return ~rule.passes(errors(outputs[:count], truth, 2), errors(decoded, truth, 2))


@dataclasses.dataclass(frozen=True)
class Stand:
    """A scene with one policy in it, ready to be published.

    Attributes:
      carry: after the first step. verified: the second, rightly.
    """

    scene: Scene
    rig: Rig
    promise: Promise
    rng: np.random.Generator
    carry: Any
    verified: Verified

    @classmethod
    def of(cls, scene: Scene, rig: Rig, promise: Promise) -> "Stand":
        carry = scene.start(rig)
        verified = rig.verify(carry, scene.second.layers(), scene.tree())
        return cls(scene, rig, promise, np.random.default_rng([scene.seed, 21]), carry, verified)

    def states(self, paths: Any, verified: Verified | None = None) -> np.ndarray:
        """What publishing these paths leaves."""
        verified = self.verified if verified is None else verified
        path = pack(paths, self.scene.shape.depth)
        return self.rig.states(self.rig.publish(verified, path))

    def seen(self, R: np.ndarray) -> np.ndarray:
        """[B]: whether a sequence's states would have been noticed."""
        return self.scene.wrong_states(R, self.promise.states).any(0)


def sibling(stand: Stand) -> np.ndarray:
    """The last accepted node is another of the same parent."""
    paths = [(*path[:-1], int(stand.rng.choice(SIBLINGS[path[-1]]))) for path in stand.scene.paths]
    return stand.seen(stand.states(paths))


def swapped_layers(stand: Stand) -> np.ndarray:
    """Two layers commit one another's records."""
    scratch = list(stand.verified.scratch)
    i, j = stand.rng.choice(len(scratch), 2, replace=False)
    scratch[i], scratch[j] = scratch[j], scratch[i]
    verified = stand.verified._replace(scratch=tuple(scratch))
    return stand.seen(stand.states(stand.scene.paths, verified))


def swapped_sequences(stand: Stand) -> np.ndarray:
    """Every sequence is left with the next one's numbers, and keeps its own counters."""
    path = pack(stand.scene.paths, stand.scene.shape.depth)

    def roll(leaf: Any) -> Any:
        return jnp.roll(leaf, 1, axis=1) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return stand.seen(stand.rig.states(jax.tree.map(roll, stand.rig.publish(stand.verified, path))))


def neighbours_path(stand: Stand) -> np.ndarray:
    """The paths of the batch are read one place off; equal ones are no mistake."""
    paths = stand.scene.paths
    moved = [paths[b - 1] for b in range(len(paths))]
    seen = stand.seen(stand.states(moved))
    return seen[[one != other for one, other in zip(paths, moved, strict=True)]]


def stale_path(stand: Stand) -> np.ndarray:
    """The step before's path and length."""
    return stand.seen(stand.states(stand.scene.before))


def stale_length(stand: Stand) -> np.ndarray:
    """This step's path under the step before's length."""
    path = pack(stand.scene.paths, stand.scene.shape.depth)
    lengths = jnp.asarray([len(before) for before in stand.scene.before], jnp.int32)
    return stand.seen(
        stand.rig.states(stand.rig.publish(stand.verified, path.replace(length=lengths)))
    )


def zero_replay(stand: Stand) -> np.ndarray:
    """A commit that does nothing."""
    return stand.seen(stand.rig.states(stand.verified.carry))


def filler_decayed(stand: Stand) -> np.ndarray:
    """One head of one layer is decayed once more, by an inactive row."""
    scene, R = stand.scene, stand.states(stand.scene.paths).copy()
    for b in range(scene.shape.batch):
        i, h = stand.rng.integers(scene.shape.layers), stand.rng.integers(scene.shape.value_heads)
        R[i, b, h] *= scene.second.alpha[i, b, len(HYDRA), h]
    return stand.seen(R)


def rounded_gate(stand: Stand) -> np.ndarray:
    """The write strength of one head went through bfloat16 for publishing, at the last node.

    The last, because what a strong decay comes after no audit can see. Values that bfloat16 holds
    are no mistake.
    """
    scene, beta = stand.scene, stand.scene.second.beta.copy()
    struck = np.zeros(scene.shape.batch, bool)
    for b, path in enumerate(scene.paths):
        i, h = stand.rng.integers(scene.shape.layers), stand.rng.integers(scene.shape.value_heads)
        old = beta[i, b, path[-1], h]
        beta[i, b, path[-1], h] = old.astype(jnp.dtype(jnp.bfloat16)).astype(np.float32)
        struck[b] = abs(beta[i, b, path[-1], h] - old) > 1e-5
    layers = dataclasses.replace(scene.second, beta=beta).layers()
    verified = stand.rig.verify(stand.carry, layers, scene.tree())
    return stand.seen(stand.states(scene.paths, verified))[struck]


def wrong_parent(stand: Stand) -> np.ndarray:
    """One leaf hangs below a row that is not its parent: seen in its output."""
    scene, trees, leaves = stand.scene, [], []
    for _ in range(scene.shape.batch):
        leaf, tree = int(stand.rng.choice(LEAVES)), list(HYDRA)
        fits = [row for row in range(len(HYDRA)) if len(path_to(HYDRA, row)) <= scene.shape.depth]
        tree[leaf] = int(stand.rng.choice([row for row in fits if row not in (leaf, tree[leaf])]))
        trees.append(tree)
        leaves.append(leaf)
    operands = scene.second.layers()
    verified = stand.rig.verify(stand.carry, operands, plant(scene.shape, trees))
    outputs = np.moveaxis(np.asarray(verified.outputs), 2, 0)
    wrong = scene.wrong_outputs(outputs, stand.promise.outputs)
    return wrong[np.array(leaves), :, np.arange(scene.shape.batch)].any(1)


FAULTS: Mapping[str, Callable[[Stand], np.ndarray]] = {
    "sibling": sibling,
    "swapped layers": swapped_layers,
    "swapped sequences": swapped_sequences,
    "neighbour's path": neighbours_path,
    "stale path": stale_path,
    "stale length": stale_length,
    "zero replay": zero_replay,
    "filler decayed": filler_decayed,
    "rounded gate": rounded_gate,
    "wrong parent": wrong_parent,
}
"""Each publishes a stand wrongly and says which strikes were seen."""
POISONS = {"huge": 1e18, "NaN": float("nan")}
"""What off-path rows hold: values so large that any trace shows, or no numbers at all."""


def poisoned(stand: Stand, poison: float) -> tuple[int, int]:
    """Instances whose published state, and those whose outputs on the path, change by a bit when
    all rows off the path hold poison, inactive ones too."""
    scene, shape = stand.scene, stand.scene.shape
    off = np.ones((shape.batch, shape.rows), bool)
    for b, path in enumerate(scene.paths):
        off[b, list(path)] = False

    def spoil(x: np.ndarray) -> np.ndarray:
        mask = off.reshape(1, *off.shape, *[1] * (x.ndim - 3))
        return np.where(mask, np.float32(poison), x)

    second = scene.second
    changes = {"v": spoil(second.v)}
    if np.isnan(poison):
        names = [field.name for field in dataclasses.fields(second)]
        changes = {name: spoil(getattr(second, name)) for name in names}
    layers = dataclasses.replace(second, **changes).layers()
    both = stand.verified, stand.rig.verify(stand.carry, layers, scene.tree())
    outputs = [np.moveaxis(np.asarray(verified.outputs), 2, 0) for verified in both]
    kept = same_bits(*outputs, axes=2) | off.T[:, None]  # [N, L, B]
    states = same_bits(*(stand.states(scene.paths, verified) for verified in both), axes=3)
    return int((~states).sum()), int((~kept.all(0)).sum())
