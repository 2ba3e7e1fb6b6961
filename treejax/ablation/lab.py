"""The operand-level laboratory: policies on synthetic operands, without a model around them.

A ``Bench`` is one policy at one batch and capacity. Trees and paths are data: one program serves
all of them. Its carry goes round from call to call, so that policies which defer their writes are
seen in their steady state.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.ablation.lab_operands import Drawn, Sizes
from treejax.ablation.lab_programs import Programs, Split, Verified
from treejax.ablation.lab_trees import Shape
from treejax.policies import Path, Policy, kernel_rows
from treejax.tree import Tree

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step reads beside operands: the trees of the batch and the path it publishes."""

    shape: Shape
    published: tuple[int, ...]
    tree: Tree
    path: Path


def make_step(
    shape: Shape, published: Sequence[int], batch: int, rows: int, most_depth: int
) -> Step:
    """The same tree and path for every sequence, in ``rows`` rows.

    Raises:
      ValueError: the tree does not fit, its rows are not sorted by depth, or the path is too long.
    """
    depths = shape.depths
    if list(depths) != sorted(depths):
        raise ValueError(f"tree {shape.name} is not packed by depth: use lab_trees.pack")
    if len(published) > most_depth + 1:
        raise ValueError(f"a path of {len(published)} rows exceeds the bound of {most_depth + 1}")
    tree = Tree.from_parents(
        *([list(range(shape.size))] * batch, [list(shape.parents)] * batch),
        capacity=rows,
        max_depth=most_depth,
    )
    nodes = np.full((batch, most_depth + 1), -1, np.int32)
    nodes[:, : len(published)] = published
    length = jnp.full(batch, len(published), jnp.int32)
    return Step(shape, tuple(published), tree, Path(jnp.asarray(nodes), length))


def rows_for(policy: Policy, capacity: int) -> int:
    """Rows that a tree of a capacity takes under a policy's implementation."""
    return capacity if policy.implementation == "xla" else kernel_rows(capacity)


class Bench:
    """One policy at one shape, with its carry.

    Attributes:
      seen: a ``Step`` of the shapes that will run, for compiling.
      temporary_bytes: what XLA allocates for a step beside arguments and results, once compiled.
    """

    def __init__(self, name: str, policy: Policy, drawn: Drawn, seen: Step):
        self.name, self.policy, self.drawn, self.seen = name, policy, drawn, seen
        sizes = drawn.sizes
        abstract = jax.ShapeDtypeStruct(drawn.R.shape, drawn.R.dtype)
        self.programs = Programs.of(policy, abstract, sizes.key_heads)
        self.carry: Split | None = None
        self.temporary_bytes: int | None = None

    def reset(self) -> None:
        """Start again from the drawn states; the old carry is given up first."""
        self.release()
        self.carry = self.programs.init(self.drawn.R, self.drawn.sizes.key_heads)

    def release(self) -> None:
        for leaf in jax.tree.leaves(self.carry):
            leaf.delete()
        self.carry = None

    def _held(self) -> Split:
        if self.carry is None:
            self.reset()
        assert self.carry is not None
        return self.carry

    def verify(self, step: Step, marks: tuple[Any, ...] | None = None) -> Verified:
        """One verify; ``marks`` in place of the carry's own."""
        held = self._held()
        own = held.marks if marks is None else marks
        made = self.programs.verify(held.state, own, self.drawn.layers, step.tree)
        self.carry = made.carry
        return made

    def verify_alone(self, step: Step, marks: tuple[Any, ...]) -> Any:
        """One verify that keeps nothing: what stands for its outputs."""
        held = self._held()
        layers = self.drawn.layers
        number, self.carry = self.programs.verify_alone(held.state, marks, layers, step.tree)
        return number

    def publish(
        self, scratch: tuple[Any, ...], step: Step, marks: tuple[Any, ...] | None = None
    ) -> None:
        held = self._held()
        own = held.marks if marks is None else marks
        self.carry = self.programs.publish(held.state, own, scratch, step.path)

    def step(self, step: Step) -> tuple[Any, ...]:
        """Verify and publish in one program: the outputs of every layer."""
        held = self._held()
        operands, tree, path = self.drawn.layers, step.tree, step.path
        outputs, self.carry = self.programs.step(held.state, held.marks, operands, tree, path)
        return outputs

    def wait(self) -> None:
        jax.block_until_ready(self.carry)

    def compile_jobs(self, split: bool) -> list[Callable[[], Any]]:
        """What compiles the programs: the step and what the gate needs, and with ``split`` verify
        and publish too.

        Each call lowers, and returns what remains to be done in a thread.
        """
        R, sizes = self.drawn.R, self.drawn.sizes
        begun = functools.partial(self.programs.init, key_heads=sizes.key_heads)
        state, marks = jax.eval_shape(begun, R)
        ratio = sizes.value_heads // sizes.key_heads
        places = [
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((len(sizes.probed_layers),), (), (ratio * len(sizes.probed_keys),))
        ]
        step, layers, programs = self.seen, self.drawn.layers, self.programs

        def both() -> Callable[[], Any]:
            lowered = programs.step.lower(state, marks, layers, step.tree, step.path)
            return lambda: self._keep_analysis(lowered.compile())

        jobs: list[Callable[[], Any]] = [
            both,
            lambda: programs.init.lower(R, sizes.key_heads).compile,
            lambda: programs.probe.lower(state, marks, *places).compile,
        ]
        if not split:
            return jobs
        made = jax.eval_shape(programs.verify, state, marks, layers, step.tree)
        return [
            *jobs,
            lambda: programs.verify.lower(state, marks, layers, step.tree).compile,
            lambda: programs.verify_alone.lower(state, marks, layers, step.tree).compile,
            lambda: programs.publish.lower(*made.carry, made.scratch, step.path).compile,
        ]

    def _keep_analysis(self, compiled: Any) -> None:
        analysis = compiled.memory_analysis()
        self.temporary_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)


def needed_bytes(policy: Policy, sizes: Sizes, batch: int, capacity: int) -> int:
    """Bytes a step of one policy needs: states drawn and carried, operands, outputs, buffers."""
    rows = rows_for(policy, capacity)
    drawn = sizes.layers * batch * sizes.state_bytes
    drawn += sizes.operand_bytes(batch, rows, policy.implementation)
    buffers = sum(policy.buffers(sizes.config, capacity, batch).values())
    return carry_bytes(policy, sizes, batch) + drawn + sizes.output_bytes(batch, rows) + buffers


@functools.cache
def carry_bytes(policy: Policy, sizes: Sizes, batch: int) -> int:
    """What a policy keeps between steps."""
    shape = sizes.layers, batch, sizes.value_heads, sizes.value_dim, sizes.key_dim
    R = jax.ShapeDtypeStruct(shape, jnp.float32)
    carry = jax.eval_shape(lambda R: policy.init(R, sizes.key_heads), R)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carry))


def sequences_that_fit(policy: Policy, sizes: Sizes, capacity: int, available: int) -> int:
    """Sequences whose recurrent carry and verify buffers fit in so many bytes."""
    each = carry_bytes(policy, sizes, 1)
    each += sum(policy.buffers(sizes.config, capacity).values())
    return max(0, available // each)


def device_bytes(limit_gib: float) -> int | None:
    """Memory that may be used: ``limit_gib``, or if that is 0 what the device says it has."""
    if limit_gib:
        return int(limit_gib * GIB)
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def does_not_fit(needed: int, available: int | None) -> str | None:
    """Why a cell is not run, or None if it is."""
    if available is None or needed <= available:
        return None
    return f"does not fit: needs {needed / GIB:.1f} GiB, has {available / GIB:.1f}"


def compile_together(
    benches: Sequence[Bench], split: bool, seen: Callable[[str], None]
) -> dict[str, str]:
    """Compile the programs of all benches in threads; {name: problem} of those that failed.

    Tracing holds Python's lock, compiling does not: each program compiles while the next is traced.
    """
    problems: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:
        pending = []
        for bench in benches:
            seen(bench.name)
            try:
                pending += [(bench.name, pool.submit(job())) for job in bench.compile_jobs(split)]
            except Exception as error:  # one policy that fails must not cost the others their rows
                problems[bench.name] = one_line(error)
        for name, future in pending:
            try:
                future.result()
            except Exception as error:
                problems.setdefault(name, one_line(error))
    return problems


def one_line(error: Exception, limit: int = 300) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:limit]


def could_not_run(problem: str) -> bool:
    """Whether an error, as ``one_line`` gives it, says that memory was lacking: the device's, or a
    kernel's shared memory. Such a row is not wrong, it is not run."""
    return "RESOURCE_EXHAUSTED" in problem or "bytes of shared memory" in problem


def frontiers(shape: Shape, batch: int, rows: int, most_depth: int) -> list[Step]:
    """A step for every node of the tree as the accepted one, the deepest first."""
    order: Iterable[int] = sorted(range(shape.size), key=lambda node: -shape.depths[node])
    return [make_step(shape, shape.path(node), batch, rows, most_depth) for node in order]
