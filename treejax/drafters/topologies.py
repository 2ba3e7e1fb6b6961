"""Named tree shapes: what a drafter fills with tokens.

A ``StaticTree`` fixes every row's parent when the program is compiled; rows are breadth-first, so
parents come first. A ``Hydra`` is one whose rows have roles: a spine of first choices, runners-up
beside each spine node, a tail that continues the spine, and rescue chains that continue the
runners-up of the root. ``Best`` fixes only a budget and leaves the shape to the data. ``parse``
turns the text that users write (``hydra27``, ``chain5``, ``3,2,1``) into one of the three.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from treejax.tree import Tree

MOST_ROWS = 1024
FORMS = (
    "chainK, caterpillarDxW, hydraDxW+T or hydraDxW+T/R1,R2, "
    "bestNxD, or widths by depth such as 3,2,1"
)


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of fixed shape. ``parents[0]`` is -1 for the root, which is counted as a row."""

    name: str
    parents: tuple[int, ...]

    @property
    def capacity(self) -> int:
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Draw order among siblings, 0 first."""
        return tuple(self.parents[:row].count(parent) for row, parent in enumerate(self.parents))

    def children(self, row: int) -> tuple[int, ...]:
        return tuple(child for child, parent in enumerate(self.parents) if parent == row)

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from the root down to ``row``, both included."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1]])
        return tuple(rows[::-1])

    def full(self, tokens: jax.Array) -> Tree:
        """The tree of ``tokens`` [B, N], row 0 the pending token; usable inside jit."""
        shape = tokens.shape
        return Tree(
            tokens=tokens.astype(jnp.int32),
            parent=jnp.broadcast_to(np.array(self.parents, np.int32), shape),
            rank=jnp.broadcast_to(np.array(self.ranks, np.int32), shape),
            size=jnp.full(shape[0], self.capacity, jnp.int32),
            max_depth=self.max_depth,
        )

    def supported(self, tokens: jax.Array) -> Tree:
        """``full``, without the rows whose token is negative and all that hangs below them."""
        ancestors = np.zeros((self.capacity, self.capacity), bool)
        for row in range(self.capacity):
            ancestors[row, list(self.path(row))] = True
        missing = (tokens < 0).at[:, 0].set(False)
        orphaned = (jnp.array(ancestors)[None] & missing[:, None, :]).any(axis=2)
        return self.full(tokens).keep(~orphaned)


@dataclasses.dataclass(frozen=True)
class Hydra(StaticTree):
    """``width`` candidates at each of ``spine`` depths, a tail below the spine, rescue chains.

    ``rescue[r]`` is the length of the chain below the root's runner-up r. LumoTree's tree of 27
    candidates (arXiv 2609.23900) is ``Hydra(5, 3, 6, (4, 2))``, row for row.
    """

    name: str = dataclasses.field(init=False)
    parents: tuple[int, ...] = dataclasses.field(init=False)
    roles: tuple[str, ...] = dataclasses.field(init=False, repr=False)
    spine: int
    width: int = 1
    tail: int = 0
    rescue: tuple[int, ...] = ()

    def __post_init__(self):
        if self.spine < 1 or self.width < 1 or self.tail < 0 or min(self.rescue, default=1) < 1:
            raise ValueError(
                f"a hydra of spine {self.spine}, width {self.width}, tail {self.tail} and rescue "
                f"{self.rescue} has no shape; expected at least 1, 1, 0 and 1 each"
            )
        if len(self.rescue) >= self.width:
            raise ValueError(
                f"a hydra of width {self.width} has {self.width - 1} runners-up to rescue, "
                f"got {len(self.rescue)} rescue lengths; widen it or drop some"
            )
        _check_rows(1 + self.spine * self.width + self.tail + sum(self.rescue))
        rows = _hydra_rows(self.spine, self.width, self.tail, self.rescue)
        object.__setattr__(self, "parents", tuple(parent for parent, _ in rows))
        object.__setattr__(self, "roles", tuple(role for _, role in rows))
        object.__setattr__(self, "name", _hydra_name(self))

    @property
    def near_rows(self) -> tuple[int, ...]:
        """Root, spine and runners-up: in this order the rows of ``Hydra(spine, width)``."""
        return self._with_role("root", "spine", "runner")

    @property
    def tail_rows(self) -> tuple[int, ...]:
        return self._with_role("tail")

    def rescue_rows(self, runner: int) -> tuple[int, ...]:
        """Rows of the chain below the root's runner-up ``runner``, counted from 0."""
        return self._with_role(f"rescue{runner}")

    def _with_role(self, *roles: str) -> tuple[int, ...]:
        return tuple(row for row, role in enumerate(self.roles) if role in roles)


@dataclasses.dataclass(frozen=True)
class Best:
    """At most ``nodes`` candidates no deeper than ``depth``: the best, whatever their shape."""

    nodes: int
    depth: int

    def __post_init__(self):
        if not 1 <= self.depth <= self.nodes:
            raise ValueError(
                f"best{self.nodes}x{self.depth} has no shape, expected 1 <= depth <= nodes"
            )
        _check_rows(1 + self.nodes)

    @property
    def name(self) -> str:
        return f"best{self.nodes}x{self.depth}"

    @property
    def capacity(self) -> int:
        return self.nodes + 1

    @property
    def max_depth(self) -> int:
        return self.depth


def _check_rows(count: int) -> None:
    if count > MOST_ROWS:
        raise ValueError(f"a tree of {count} rows is too large, expected at most {MOST_ROWS}")


def _hydra_rows(
    spine: int, width: int, tail: int, rescue: tuple[int, ...]
) -> list[tuple[int, str]]:
    """(parent, role) of every row, depth by depth: spine or tail, then the rescue chains."""
    rows = [(-1, "root")]
    main = 0
    chains = list(range(2, 2 + len(rescue)))  # the root's runners-up follow its first choice
    for depth in range(1, 1 + max(spine + tail, 1 + max(rescue, default=0))):
        above, first = main, len(rows)
        if depth <= spine:
            rows += [(above, "spine")] + [(above, "runner")] * (width - 1)
            main = first
        elif depth <= spine + tail:
            rows.append((above, "tail"))
            main = first
        for r, length in enumerate(rescue):
            if 2 <= depth <= 1 + length:
                rows.append((chains[r], f"rescue{r}"))
                chains[r] = len(rows) - 1
    return rows


def _hydra_name(tree: Hydra) -> str:
    settings = (tree.spine, tree.width, tree.tail, tree.rescue)
    for name, named in NAMED.items():
        if settings == named:
            return name
    if tree.tail == 0 and not tree.rescue:
        if tree.width == 1:
            return f"chain{tree.spine}"
        return f"caterpillar{tree.spine}x{tree.width}"
    rescue = "/" + ",".join(map(str, tree.rescue)) if tree.rescue else ""
    return f"hydra{tree.spine}x{tree.width}+{tree.tail}{rescue}"


def _widths(name: str, widths: tuple[int, ...]) -> StaticTree:
    parents, level = [-1], [0]
    for width in widths:
        start = len(parents)
        _check_rows(start + len(level) * width)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return StaticTree(name, tuple(parents))


NAMED = {"hydra27": (5, 3, 6, (4, 2)), "hydra8": (4, 1, 4, ())}  # spine, width, tail, rescue
_NUMBER = r"([1-9]\d{0,3})"
_CHAIN = re.compile(f"chain{_NUMBER}")
_CATERPILLAR = re.compile(f"caterpillar{_NUMBER}x{_NUMBER}")
_HYDRA = re.compile(rf"hydra{_NUMBER}x{_NUMBER}\+(\d{{1,4}})(?:/(\d{{1,4}}(?:,\d{{1,4}})*))?")
_BEST = re.compile(f"best{_NUMBER}x{_NUMBER}")
_WIDTHS = re.compile(f"{_NUMBER}(,{_NUMBER})*")


@functools.cache
def parse(spec: str) -> StaticTree | Best:
    """The tree that ``spec`` names.

    Raises:
      ValueError: one line with the forms that exist, or what is wrong with the numbers.
    """
    if spec in NAMED:
        return Hydra(*NAMED[spec])
    if found := _CHAIN.fullmatch(spec):
        return Hydra(int(found[1]))
    if found := _CATERPILLAR.fullmatch(spec):
        return Hydra(int(found[1]), int(found[2]))
    if found := _HYDRA.fullmatch(spec):
        rescue = tuple(int(length) for length in found[4].split(",")) if found[4] else ()
        return Hydra(int(found[1]), int(found[2]), int(found[3]), rescue)
    if found := _BEST.fullmatch(spec):
        return Best(int(found[1]), int(found[2]))
    if _WIDTHS.fullmatch(spec):
        return _widths(spec, tuple(int(width) for width in spec.split(",")))
    raise ValueError(f"tree {spec!r} is unknown, expected {', '.join(NAMED)}, {FORMS}")
