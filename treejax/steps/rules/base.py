"""What an acceptance rule is, and how one that tosses coins becomes a decision.

A rule that tosses coins first gives a ``Law`` of one sequence, computed without chance from the
target's p and the drafter's q; ``decide`` then takes the draws: a coin for every row and one
Gumbel vector for the token after the path. Both work in the float type of p, so that a test may
enumerate every draw in float64. Only ``choose`` makes draws, from the sequence's key.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from treejax.history import History, along_paths
from treejax.sampling import COIN, FINAL, Sampling, noise, process
from treejax.shapes import Array
from treejax.steps.choice import Choice
from treejax.steps.rules.kin import kin_of
from treejax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """An acceptance rule; its settings are static under jit.

    Attributes:
      name: the registry's.
      lossless: whether the output has exactly the target's law, given honest proposals.
      takes: the kinds of proposals (``drafters.base.PROPOSALS``) that it is right for.
      needs_q: whether it reads the probabilities that candidates were drawn with.
      chains_only: whether no node may have two children.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    takes: ClassVar[frozenset[str]]
    needs_q: ClassVar[bool]
    chains_only: ClassVar[bool] = False

    @property
    def serves(self) -> frozenset[str]:
        """The kinds of proposals that it is right for with its present settings."""
        return self.takes

    def sharpest(self, proposals: str) -> "Rule":
        """The form of the rule that accepts most of such proposals."""
        return self

    @abc.abstractmethod
    def choose(
        self,
        tree: Tree,
        logits: Array,
        sampling: Sampling,
        key: Array | None,
        position: Array | None,
        history: History | None,
        q: Array | None,
    ) -> Choice:
        """The choice for one sequence: logits and q [N, V], everything without a batch axis.

        Key and position are None when the settings are greedy.
        """


class Law(struct.PyTreeNode):
    """How one tree is decided, but for chance.

    ``leaves_first`` false: the walk starts at the root and tests the children of the row where it
    stands in the order in which they were drawn. ``chance`` is that of a row whose parent was
    reached and whose earlier siblings were rejected. The walk ends where every child is rejected.
    ``leaves_first`` true: rows are tested in post-order, and the first that is accepted brings its
    whole path. ``chance`` is that of a row when every test before it has failed.

    Attributes:
      chance: [N] probability of acceptance; 1 for the root, 0 in inactive rows.
      weights: [N, V] the law of the token after the path, if it ends at the row; sums to 1.
    """

    chance: Array
    weights: Array
    leaves_first: bool = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True)
class CoinRule(Rule):
    """A rule that is described by its law."""

    @abc.abstractmethod
    def law(self, tree: Tree, p: Array, q: Array | None) -> Law:
        """The law of one tree: p and q [N, V], row v for the children of v, of one float type."""

    def choose(self, tree, logits, sampling, key, position, history, q) -> Choice:
        if history is not None:
            history = along_paths(history, tree.tokens, kin_of(tree).ancestors)
        p = jax.nn.softmax(process(logits, sampling, history), axis=-1)
        law = self.law(tree, p, None if q is None else q.astype(p.dtype))
        if (
            key is None or position is None
        ):  # greedy: p is one-hot, so that every chance is 0 or 1 and so is every weight
            return decide(tree, law, jnp.full_like(law.chance, 0.5), jnp.zeros_like(p[0]))
        return decide(
            tree, law, coins(key, position, p.shape[0]), noise(key, position, p.shape[1], FINAL)
        )


def decide(tree: Tree, law: Law, coins: Array, gumbel: Array) -> Choice:
    """The choice for one tree, given every draw.

    Args:
      tree: one sequence's.
      law: what its rule makes of it.
      coins: [N] in [0, 1); a row passes its test iff its coin is below its chance, strictly, so
        that chance 0 never passes.
      gumbel: [V] standard Gumbel noise for the token after the path.
    """
    kin = kin_of(tree)
    rows = jnp.arange(kin.active.shape[0], dtype=jnp.int32)
    passes = kin.active & ((coins < law.chance) | (rows == 0))
    if law.leaves_first:
        end = jnp.argmin(jnp.where(passes, kin.leaves_first, rows.shape[0]))
    else:
        first = passes & ~(kin.earlier & passes[None, :]).any(axis=1)
        reached = kin.active & (first[None, :] | ~kin.ancestors).all(axis=1)
        end = jnp.argmax(jnp.where(reached, kin.depth, -1))
    bound = tree.max_depth + 1
    place = jnp.where(kin.ancestors[end], kin.depth, bound)  # off the path: dropped
    return Choice(
        path=jnp.full(bound, -1, jnp.int32).at[place].set(rows, mode="drop"),
        length=kin.depth[end] + 1,
        pending=jnp.argmax(jnp.log(law.weights[end]) + gumbel).astype(jnp.int32),
    )


def coins(key: Array, position: Array, count: int) -> Array:
    """[count] float32 in [0, 1), one for each row, for the step that starts at ``position``.

    Two draws a coin, as one has 2^23 values: it would be 0, and pass any chance above 0, once in
    8 million tosses.
    """

    def coin(row: Array) -> Array:
        own = key
        for data in (position, COIN, row):
            own = jax.random.fold_in(own, data)
        coarse, fine = jax.random.uniform(own, (2,), jnp.float32)
        return jnp.minimum(coarse + fine * 2.0**-23, 1 - 2.0**-24)  # the sum may round to 1

    return jax.vmap(coin)(jnp.arange(count))
