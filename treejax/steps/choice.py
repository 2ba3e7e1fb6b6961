"""What ``select`` decides: the path that a step keeps, and the token that follows it."""

import jax.numpy as jnp
from flax import struct
from jax import lax

from treejax.shapes import Array
from treejax.tree import Tree


class Choice(struct.PyTreeNode):
    """The path that a step keeps, and the next pending token.

    Attributes:
      path: [B, max_depth + 1] int32 node ids from the root down, -1 padded.
      length: [B] int32 nodes in the path, the root included; 0 in a row that takes no part.
      pending: [B] int32 the token after the path: emitted, and the root of the next tree.
    """

    path: Array
    length: Array
    pending: Array

    @property
    def accepted(self) -> Array:
        """[B] int32 number of accepted candidates: neither the root nor the pending token."""
        return jnp.maximum(self.length - 1, 0)

    def emitted(self, tree: Tree) -> tuple[Array, Array]:
        """What the step adds to the text: (tokens [B, max_depth + 1], count [B]).

        The accepted candidates' tokens, then the pending token, then -1; ``count`` is ``length``.
        ``tree`` is the tree that was verified.
        """
        below = jnp.pad(self.path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        tokens = jnp.take_along_axis(tree.tokens, jnp.maximum(below, 0), axis=1)
        tokens = jnp.where(below >= 0, tokens, -1)
        last = lax.broadcasted_iota(jnp.int32, tokens.shape, 1) == self.length[:, None] - 1
        return jnp.where(last, self.pending[:, None], tokens), self.length

    def mask(self, active: Array) -> "Choice":
        """Rows where ``active`` [B] is false take no part: length 0, path -1, pending as it is."""
        return self.replace(
            path=jnp.where(active[:, None], self.path, -1),
            length=jnp.where(active, self.length, 0),
        )
