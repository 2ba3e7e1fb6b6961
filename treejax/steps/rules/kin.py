"""How the rows of one tree are related: what rules need beyond parents and depth."""

import jax
import jax.numpy as jnp
from flax import struct

from treejax.shapes import Array
from treejax.tree import Tree, describe


class Kin(struct.PyTreeNode):
    """The relations of one tree of N rows, packed in any order.

    Attributes:
      active: [N] bool, rows in use and within the depth bound.
      parent: [N] int32, 0 for the root and for inactive rows.
      depth: [N] int32.
      ancestors: [N, N] bool, active row v marks itself and its ancestors.
      earlier: [N, N] bool, active row v marks its siblings that were drawn before it: of lower
        rank, or of equal rank in a lower row.
    """

    active: Array
    parent: Array
    depth: Array
    ancestors: Array
    earlier: Array

    @property
    def draw_order(self) -> Array:
        """[N] int32 row ids: parents before children, siblings as drawn, inactive rows last."""
        rows = self.active.shape[0]
        nth = self.earlier.sum(axis=1, dtype=jnp.int32)
        key = jnp.where(self.active, self.depth * rows + nth, rows * rows)
        return jnp.argsort(key, stable=True).astype(jnp.int32)

    @property
    def leaves_first(self) -> Array:
        """[N] int32 place of each active row in post-order: children as drawn, then their parent.

        A row comes after all that hangs below the siblings before it and before its ancestors, and
        after its own descendants.
        """
        below = self.ancestors.sum(axis=0, dtype=jnp.int32)  # rows in v's sub-tree, v included
        skipped = jnp.where(self.earlier, below[None, :], 0).sum(axis=1, dtype=jnp.int32)
        start = jnp.where(self.ancestors, skipped[None, :], 0).sum(axis=1, dtype=jnp.int32)
        return start + below - 1


def kin_of(tree: Tree) -> Kin:
    """The relations of one tree, without a batch axis; usable inside jit."""
    shape = jax.tree.map(lambda x: x[0], describe(jax.tree.map(lambda x: x[None], tree)))
    active = shape.active & (shape.depth <= tree.max_depth)
    rows = jnp.arange(active.shape[0], dtype=jnp.int32)
    siblings = (tree.parent[:, None] == tree.parent[None, :]) & active[:, None] & active[None, :]
    lower = tree.rank[None, :] < tree.rank[:, None]
    equal = tree.rank[None, :] == tree.rank[:, None]
    return Kin(
        active=active,
        parent=jnp.where(active, jnp.maximum(tree.parent, 0), 0),
        depth=shape.depth,
        ancestors=shape.ancestors & active[:, None],
        earlier=siblings & (lower | (equal & (rows[None, :] < rows[:, None]))),
    )
