"""Steps that are kept short on purpose: the root alone, or a sequence that sits out."""

import dataclasses

import jax.numpy as jnp

from treejax.audit.faults.base import Fault, Hit, Strike
from treejax.audit.step import Subject
from treejax.drafters.base import path_tokens
from treejax.shapes import Array
from treejax.steps.select import Choice
from treejax.tree import Tree

ROOT, OUT, FREE = 0, -1, 1
"""Depth limits: the root alone is verified and published; nothing is; from here on, the whole tree.
"""


@dataclasses.dataclass(frozen=True)
class Limited(Fault):
    """No fault: where it strikes, ``hit.row`` is ``ROOT`` or ``OUT``, one of the loop's limits.

    Data, so that the program that runs tree steps runs these too.
    """

    name: str = "limits"
    says: str = "nothing is wrong, some steps are short"

    def tree(self, tree: Tree, hit: Hit) -> Tree:
        return tree.trim(jnp.where(hit.now, hit.row, tree.max_depth))

    def chosen(self, tree: Tree, choice: Choice, hit: Hit) -> Choice:
        root, out = hit.now & (hit.row == ROOT), hit.now & (hit.row == OUT)
        pending = choice.pending
        if tree.max_depth:  # what the target draws at the root, accepted candidate or not
            below = path_tokens(tree, choice.path)[:, 1]
            pending = jnp.where(root & (choice.length > 1), below, pending)
        first = jnp.arange(choice.path.shape[1])[None, :] == 0
        cut = choice.replace(
            path=jnp.where(root[:, None] & ~first, -1, choice.path),
            length=jnp.where(root, jnp.minimum(choice.length, 1), choice.length),
            pending=jnp.where(out, tree.tokens[:, 0], pending),
        )
        return cut.mask(~out)


def with_limits(subject: Subject) -> Subject:
    """The subject as it is run: told which steps to keep short."""
    return dataclasses.replace(subject, fault=Limited())


def limited(limit: Array) -> Strike:
    """Strikes of the step of index 0: ``limit`` [B] int32, larger than ``ROOT`` for none."""
    nowhere = jnp.zeros_like(limit)
    return Strike(jnp.where(limit <= ROOT, 0, -1), nowhere, nowhere, limit)
