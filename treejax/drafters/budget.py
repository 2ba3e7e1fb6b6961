"""A budget for drafting: how many candidates, step by step, and none where drafting does not pay.

Several drafters of growing size share one memory and one model; the loop compiles a step for each
and runs the one from which measured costs and measured acceptance promise most tokens a second
(``pace``), for as many steps as teach nothing that would change it. Without a draft a step is plain
decoding, at its price.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from treejax.drafters.base import Draft, Drafter
from treejax.drafters.ledger import Ledger
from treejax.drafters.mtp import MTP
from treejax.drafters.mtp_tree import MTPTree
from treejax.drafters.pace import Pace
from treejax.drafters.resting import Resting
from treejax.drafters.topologies import Best, StaticTree
from treejax.sampling import Sampling
from treejax.shapes import Array
from treejax.tree import Tree

SIZES = (MTP("chain2"), MTP("chain5"), MTPTree("best15x10"), MTPTree("best31x12"))


@dataclasses.dataclass(frozen=True)
class Budget:
    """Chooses among ``sizes`` and no draft at all.

    Attributes:
      sizes: drafters of growing capacity that keep the same memory: the head's, say.
      patience: seconds served for each that may be lost to trying sizes that do not look best.
      ledger: figures that outlive a call; by default an object's calls share its own. They are
        those of one model, device and size of batch, which ``init`` checks, and of one policy,
        which no drafter sees: make an object for each policy.
    """

    sizes: tuple[Any, ...] = SIZES
    patience: int = 100
    # None until __post_init__, which knows the depths that a ledger is made for.
    ledger: Ledger = dataclasses.field(default=None, compare=False)  # type: ignore[assignment]
    # What ``init`` found in order: to trace every size's proposals takes longer than a short text.
    _checked: set = dataclasses.field(default_factory=set, compare=False, repr=False, init=False)

    name: ClassVar[str] = "budget"

    def __post_init__(self):
        if not self.sizes or self.patience < 1:
            raise ValueError(
                "drafter 'budget' needs sizes to choose from, and patience of 1 or more"
            )
        capacities = [size.capacity for size in self.sizes]
        if sorted(set(capacities)) != capacities or capacities[0] < 2:
            raise ValueError(
                f"drafter 'budget' has sizes of {capacities} rows, expected growing ones"
            )
        for name in ("proposals", "vocabulary", "store", "lookup", "mix"):
            if len({getattr(size, name, None) for size in self.sizes}) > 1:
                raise ValueError(
                    f"drafter 'budget' has sizes that differ in {name}, expected sizes that "
                    "differ in their trees"
                )
        if self.ledger is None:
            object.__setattr__(self, "ledger", Ledger(self._depths, self._rows))
        if self.ledger.depths != self._depths or self.ledger.rows != self._rows:
            raise ValueError(
                f"drafter 'budget' has a ledger of depths {self.ledger.depths} and rows "
                f"{self.ledger.rows}, expected {self._depths} and {self._rows}: those of plain "
                "decoding, then those of the sizes"
            )

    @property
    def _depths(self) -> tuple[int, ...]:
        return (0, *(size.max_depth for size in self.sizes))

    @property
    def _rows(self) -> tuple[int, ...]:
        return (1, *(size.capacity for size in self.sizes))

    @property
    def _deepest(self) -> Drafter:
        return max(self.sizes, key=lambda size: size.max_depth)

    @property
    def forms(self) -> tuple[Any, ...]:
        """What the loop may run: no draft, then the sizes."""
        return (Resting(inner=self._deepest), *self.sizes)

    @property
    def proposals(self) -> str:
        return self.sizes[0].proposals

    @property
    def shape(self) -> StaticTree | Best:
        return self.sizes[-1].shape

    @property
    def capacity(self) -> int:
        return self.sizes[-1].capacity

    @property
    def max_depth(self) -> int:
        return self._deepest.max_depth

    def pace(self, sampling: Sampling) -> Pace:
        warm = sampling.temperature
        kind = 0.0 if warm is None else tuple(np.ravel(warm).tolist())
        return Pace(self.ledger, self.patience, kind)

    def init(self, model: Any, batch: int, max_length: int) -> Draft:
        """Memory of the deepest size, which has room for the others.

        Raises:
          ValueError: a size cannot serve the model, or keeps another memory; the ledger holds
            figures of another model, device or size of batch.
        """
        serves = model.config, str(model.dtype), _device(model), batch
        self.ledger.serve(serves)
        made = self._deepest.init(model, batch, max_length)
        if (serves, max_length) not in self._checked:
            self._check(made, model, batch, max_length)
            self._checked.add((serves, max_length))
        return made

    def _check(self, made: Draft, model: Any, batch: int, max_length: int) -> None:
        """Refuse sizes that cannot go on from one another's memory."""
        known = jax.tree.structure((made.memory, made.weights))
        for size in self.sizes:
            other = jax.eval_shape(lambda size=size: size.init(model, batch, max_length))
            alike = jax.tree.structure((other.memory, other.weights)) == known
            if not alike or not _keeps(size, made, batch):
                raise ValueError(
                    f"drafter 'budget': {size.name!r} with {size.shape.name} cannot go on from the "
                    f"memory of {self._deepest.shape.name}, expected sizes that keep the same"
                )

    def prime(self, draft: Draft, hidden: Array, tokens: Array, lengths: Array) -> Draft:
        return self._deepest.prime(draft, hidden, tokens, lengths)

    def propose(
        self, draft: Draft, state: Any, pending: Array, key: Array
    ) -> tuple[Tree, Array | None, Draft]:
        """The largest size's proposal; the loop calls its ``forms`` instead."""
        return self.sizes[-1].propose(draft, state, pending, key)

    def observe(self, draft: Draft, tree: Tree, choice: Any, hidden: Array) -> Draft:
        return self.sizes[-1].observe(draft, tree, choice, hidden)

    def rest(self, draft: Draft, pending: Array) -> Draft:
        return self._deepest.rest(draft, pending)

    def learn(self, tokens: Any) -> None:
        self._deepest.learn(tokens)


def _device(model: Any) -> str:
    """Kind and number of the devices that hold the model's weights."""
    devices = jax.tree.leaves(model.params)[0].devices()
    return f"{len(devices)} x {next(iter(devices)).device_kind}"


def _keeps(size: Drafter, draft: Draft, batch: int) -> bool:
    """Whether a size's proposals leave the draft's memory in the shapes in which it is."""

    def after(draft: Draft) -> Any:
        state = SimpleNamespace(length=jnp.zeros(batch, jnp.int32))
        pending, keys = jnp.zeros(batch, jnp.int32), jax.vmap(jax.random.key)(jnp.arange(batch))
        return size.propose(draft, state, pending, keys)[2].memory

    try:
        made = jax.eval_shape(after, draft)
    except TypeError:
        return False  # shapes that do not go together
    kinds = [
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(memory)]
        for memory in (made, draft.memory)
    ]
    return kinds[0] == kinds[1]
