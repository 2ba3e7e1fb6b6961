"""Faults of the step itself: which token is verified, which rows come back, how much is kept."""

import jax
import jax.numpy as jnp
import numpy as np

from treejax.audit.faults.base import Course, Fault, Hit, masked, nth
from treejax.model import Output
from treejax.policies import Policy
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import publish_path
from treejax.steps.select import Choice
from treejax.steps.verify import Scratch
from treejax.tree import Tree


class StaleRoot(Fault):
    """The previous pending token is verified as the root."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        changed = np.zeros_like(course.always)
        changed[1:] = course.tokens[1:, :, 0] != course.tokens[:-1, :, 0]
        return changed

    def tree(self, tree: Tree, hit: Hit) -> Tree:
        root = jnp.where(hit.now, hit.before.pending, tree.tokens[:, 0])
        return tree.replace(tokens=tree.tokens.at[:, 0].set(root))


class RowsMixedUp(Fault):
    """Two neighbouring rows come back from the kernels' order exchanged."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.sizes > 1

    def verified(self, tree: Tree, out: Output, scratch: Scratch, hit: Hit) -> Output:
        rows = jnp.arange(tree.capacity)[None, :]
        row = nth((rows > 0) & (rows < tree.size[:, None]), hit.row)[:, None]
        source = jnp.where(rows == row, row - 1, jnp.where(rows == row - 1, row, rows))
        source = jnp.where(hit.now[:, None] & (row > 0), source, rows)[:, :, None]
        return Output(
            logits=jnp.take_along_axis(out.logits, source, axis=1),
            hidden=jnp.take_along_axis(out.hidden, source, axis=1),
        )


class BonusLost(Fault):
    """On full acceptance one node too few is kept; the token that follows is that of the whole."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return (course.lengths == course.depths.max(axis=2) + 1) & (course.lengths > 1)

    def chosen(self, tree: Tree, choice: Choice, hit: Hit) -> Choice:
        return _shorter(choice, hit, drop=True)


class OneTooMany(Fault):
    """A cut in the middle of a path counts for the text; the state keeps one node more."""

    def shows(self, policy: Policy, course: Course) -> np.ndarray:
        return course.lengths > 1

    def chosen(self, tree: Tree, choice: Choice, hit: Hit) -> Choice:
        cut = _shorter(choice, hit, drop=False)  # the node stays in the path for ``published``
        last = jnp.take_along_axis(choice.path, cut.length[:, None], axis=1, mode="clip")
        token = jnp.take_along_axis(tree.tokens, jnp.maximum(last, 0), axis=1)[:, 0]
        return cut.replace(pending=jnp.where(cut.length < choice.length, token, choice.pending))

    def published(
        self, state: State, scratch: Scratch, choice: Choice, after: State, hit: Hit
    ) -> State:
        end = jnp.minimum(choice.length, choice.path.shape[1] - 1)[:, None]
        more = hit.now & (jnp.take_along_axis(choice.path, end, axis=1)[:, 0] >= 0)
        more = more & (choice.length < choice.path.shape[1])
        longer = choice.replace(length=choice.length + more.astype(jnp.int32))
        wrong = publish_path(state, scratch, longer)

        def take(wrong: Array, right: Array) -> Array:
            return jnp.where(masked(hit, right, axis=1), wrong, right)

        return after.replace(
            recurrent=jax.tree.map(take, wrong.recurrent, after.recurrent),
            conv=take(wrong.conv, after.conv),
            keys=take(wrong.keys, after.keys),
            values=take(wrong.values, after.values),
            length=jnp.where(hit.now, wrong.length, after.length),
        )


def _shorter(choice: Choice, hit: Hit, drop: bool) -> Choice:
    """The struck paths of more than the root without their last node."""
    cut = hit.now & (choice.length > 1)
    length = choice.length - cut.astype(jnp.int32)
    beyond: Array = jnp.arange(choice.path.shape[1])[None, :] >= length[:, None]
    path = jnp.where(masked(hit, choice.path) & beyond, -1, choice.path) if drop else choice.path
    return choice.replace(path=path, length=length)
