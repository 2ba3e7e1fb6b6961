"""The gate of ``step_cost``: nothing is timed that does not compute what plain decoding computes.

**Logits.** Every node of a tree of random tokens is held against plain decoding along its own
path, from the same state. Both are right and neither is exact (``envelope``). What the bound is
worth says ``stranger_error``, printed beside it: how far a node's logits are from another node's
at the least, which is what a fault would give.

**Published states.** After the deepest path, R, the convolution history and the new attention rows
are held against plain's by the same tolerance, and the earlier rows bit for bit. That R is what
the policy promises is seen from the operands that were verified: the float64 recurrence over them
is met to ``lab_gate.TOLERANCE``, 1e-5 but for a policy's own precision, commit after commit, and
``replay`` and ``solve_replay`` leave bit for bit what publishing one node at a time leaves, which
is what plain decoding does.

**The whole step** must emit what the script says, token for token, and leave plain's state.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bench.truth import exact, recurrence
from treejax.ablation.base import Row
from treejax.ablation.lab_gate import TOLERANCE
from treejax.ablation.lab_timing import period
from treejax.ablation.step_cost_bench import Bench, path_choice
from treejax.ablation.step_cost_model import REFRAIN, ModelSizes
from treejax.ablation.step_cost_phases import Verified, probed_layers
from treejax.agreement import NEAR_TIE, STATE_TOLERANCE
from treejax.shapes import Array
from treejax.state import State
from treejax.steps.publish import path_in_scratch
from treejax.steps.together import Emission
from treejax.tree import Tree

BITWISE = ("replay", "solve_replay")


def envelope(sizes: ModelSizes) -> tuple[float, float]:
    """What rounding may do: relative RMS of logits and surfaces, and nats that an argmax may lie
    below plain's own.

    A bfloat16 keeps 8 bits, so that one rounding is off by 2^-8 / sqrt(3) in the mean square. The
    residual stream is rounded twice a layer, which adds up like a random walk to sqrt(2 L) of
    these; two ways to compute the same differ by sqrt(2) of that; and what is off early grows on
    its way through the layers, for which, and because the worst of all nodes and sequences is held
    against it, a factor of 4 is allowed: together 2^-8 sqrt(64 L / 3), 0.14 at 64 layers. Seen were
    0.02 at 16 layers, and at 64 layers 0.08 for 6 nodes, 0.10 for 28 and 0.12 for 8 x 28. The bound
    is never below that of ``agreement``, 0.05 and in float32 3e-5; its near tie of 0.25 nats grows
    alike.
    """
    agreed = STATE_TOLERANCE[sizes.dtype]
    walk = 2.0**-8 * math.sqrt(64 * sizes.layers / 3) if sizes.dtype == "bfloat16" else 0.0
    allowed = max(agreed, walk)
    return allowed, NEAR_TIE[sizes.dtype] * allowed / agreed


@dataclasses.dataclass
class Verdict:
    """What was found, by name, and what is wrong with it."""

    measures: Row = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def note(self, name: str, value: float, allowed: float) -> None:
        """Keep the largest value of a name; above what is allowed it is a problem."""
        self.measures[name] = max(value, self.measures.get(name, 0.0))
        if not value <= allowed:  # NaN is not
            self.problems.append(f"{name} is {value:.2e}, expected at most {allowed:.0e}")

    @property
    def problem(self) -> str | None:
        return "; ".join(dict.fromkeys(self.problems)) or None


def check(bench: Bench, plain: Bench, context: int, phases: bool) -> Verdict:
    """Hold an arm against plain decoding at one context; ``phases`` checks those programs too.

    The benches' states are given up and made anew.
    """
    verdict = Verdict()
    if phases:
        _check_logits(bench, plain, context, verdict)
        _check_commits(bench, context, verdict)
    _check_whole(bench, plain, context, verdict)
    return verdict


def leaf_paths(bench: Bench) -> list[tuple[int, ...]]:
    """Root-to-leaf paths, the deepest last."""
    tree = bench.arm.tree
    leaves = [row for row in range(tree.capacity) if row not in tree.parents]
    return sorted(map(tree.path, leaves), key=len)


def random_tokens(bench: Bench) -> np.ndarray:
    """[B, N] tokens that all differ within a sequence where the vocabulary allows it."""
    vocabulary, count = bench.model.config.vocab_size, bench.arm.tree.capacity
    random = np.random.default_rng(bench.seed)
    rows = [random.choice(vocabulary, count, vocabulary < count) for _ in range(bench.batch)]
    return np.stack(rows).astype(np.int32)


def _check_logits(bench: Bench, plain: Bench, context: int, verdict: Verdict) -> None:
    """Every node's logits, and the state after the deepest path."""
    tolerance, near = envelope(bench.sizes)
    tokens, paths = random_tokens(bench), leaf_paths(bench)
    bench.hold()
    bench.rewind(context)
    made = bench.verify(bench.arm.tree.full(jnp.asarray(tokens)))
    logits, seen = made.output.logits, set()
    for path in paths:
        plain.hold()
        plain.rewind(context)
        for node in path:
            alone = plain.verify(Tree.root_only(jnp.asarray(tokens[:, node])))
            if node not in seen:
                other = (node + 1) % logits.shape[1]
                at = jnp.int32(node), jnp.int32(other)
                error, margin, stranger = map(
                    float, _compare_logits(logits, *at, alone.output.logits[:, 0])
                )
                verdict.note("logits_error", error, tolerance)
                verdict.note("argmax_margin", margin, near)
                if other != node:
                    least = verdict.measures.get("stranger_error", stranger)
                    verdict.measures["stranger_error"] = min(least, stranger)
                seen.add(node)
            if path == paths[-1] or node != path[-1]:
                plain.publish(alone.scratch, path_choice([0], plain.batch, 1))
    choice = path_choice(list(paths[-1]), bench.batch, bench.arm.tree.max_depth + 1)
    bench.publish(made.scratch, choice)
    _compare_states(bench, plain, context, len(paths[-1]), verdict)


def _check_commits(bench: Bench, context: int, verdict: Verdict) -> None:
    """R against the recurrence over the operands that were verified, for a few commits."""
    policy, row = bench.arm.policy, bench.batch - 1
    precision = getattr(policy, "precision", "ieee")
    layers = probed_layers(bench.model.config)
    bench.hold()
    bench.rewind(context)
    expected = [exact(R) for R in _rows(bench, layers, row)]
    tree = bench.arm.tree.full(jnp.asarray(random_tokens(bench)))
    paths = leaf_paths(bench)
    for commit in range(period(policy) + 1):
        bench.rewind(context)
        path = paths[-1 - commit % len(paths)]
        choice = path_choice(list(path), bench.batch, tree.max_depth + 1)
        made = bench.verify(tree)
        expected = _replayed(expected, made, choice, row)
        bench.publish(made.scratch, choice)
        published = [exact(R) for R in _rows(bench, layers, row)]
        error = np.sqrt(
            sum(np.sum((a - b) ** 2) for a, b in zip(published, expected, strict=True))
            / sum(np.sum(b**2) for b in expected)
        )
        verdict.note("native_error", float(error), TOLERANCE[precision])
    if policy.name in BITWISE:
        verdict.measures["bitwise"] = _is_bitwise(bench, context, tree, paths[-1])
        if not verdict.measures["bitwise"]:
            verdict.problems.append(
                "the published R is not bit for bit what publishing node by node leaves"
            )


def _replayed(states: list[np.ndarray], made: Verified, choice: Any, row: int) -> list[np.ndarray]:
    """The float64 states after the path's operands, by probed layer."""
    path = path_in_scratch(choice.path, choice.length, made.scratch.place)
    nodes = np.asarray(path.nodes)[row, : int(path.length[row])]
    parents, last = list(range(-1, len(nodes) - 1)), len(nodes) - 1
    after = []
    for R, o in zip(states, made.probes, strict=True):
        rows = tuple(exact(x[row])[nodes] for x in (o.q, o.k, o.v, o.g, o.beta))
        after.append(recurrence(R, parents, rows, [last])[1][last])
    return after


def _is_bitwise(bench: Bench, context: int, tree: Tree, path: tuple[int, ...]) -> bool:
    """Whether a path published at once leaves the bits of its nodes published one by one."""
    found = []
    for pieces in ([list(path)], [[node] for node in path]):
        bench.hold()
        bench.rewind(context)
        scratch = bench.verify(tree).scratch
        for nodes in pieces:
            bench.publish(scratch, path_choice(nodes, bench.batch, tree.max_depth + 1))
        found.append(jnp.copy(bench.arm.policy.read(bench.held.state.recurrent)))
    return bool(jnp.array_equal(*found))


def _check_whole(bench: Bench, plain: Bench, context: int, verdict: Verdict) -> None:
    """The step as it will be timed: two steps of the shortest and of the longest script, and of
    the longest as the loop makes them."""
    lengths = bench.arm.lengths or (None,)
    for length in dict.fromkeys((lengths[0], lengths[-1])):
        bench.hold()
        bench.rewind(context, length)
        emissions = [jax.device_get(bench.step()) for _ in range(2)]
        _compare_emissions(emissions, length, bench, plain, context, verdict)
    if bench.looped:
        bench.hold()
        bench.rewind(context, lengths[-1])
        emissions = []
        for _ in range(2 // bench.steps_a_visit):
            visit = jax.device_get(bench.loop(bench.steps_a_visit))
            if int(visit.made) != bench.steps_a_visit:
                verdict.problems.append(f"the loop made {int(visit.made)} steps of a visit's")
                return
            for at in range(bench.steps_a_visit):
                emissions.append(jax.tree.map(lambda x, at=at: x[at], visit.emission))
        _compare_emissions(emissions, lengths[-1], bench, plain, context, verdict)


def _compare_emissions(
    emissions: list[Emission],
    length: int | None,
    bench: Bench,
    plain: Bench,
    context: int,
    verdict: Verdict,
) -> None:
    """What steps emitted, and the state that they left beside plain's after as many tokens."""
    counts = np.stack([emission.count for emission in emissions])
    emitted = np.concatenate(
        [e.tokens[b, : e.count[b]] for e in emissions for b in range(bench.batch)]
    )
    if not (emitted == REFRAIN).all():
        wrong = emitted[emitted != REFRAIN][0]
        verdict.problems.append(f"the step emits token {wrong}, plain decoding {REFRAIN}")
    if not (counts == (counts[0, 0] if length is None else length)).all():
        verdict.problems.append(
            f"the step emits {counts.tolist()} tokens, the script says {length}"
        )
        return
    plain.hold()
    plain.rewind(context)
    total = int(counts[:, 0].sum())
    for _ in range(total):
        emission = jax.device_get(plain.step())
        if not (emission.tokens[:, 0] == REFRAIN).all():
            verdict.problems.append(f"plain decoding does not go on with token {REFRAIN}")
    _compare_states(bench, plain, context, total, verdict)


def _compare_states(bench: Bench, plain: Bench, context: int, count: int, verdict: Verdict) -> None:
    """Surfaces of two benches that began alike and have published ``count`` tokens."""
    tolerance, _ = envelope(bench.sizes)
    mine, theirs = bench.held.state, plain.held.state
    if not (np.asarray(mine.length) == np.asarray(theirs.length)).all():
        verdict.problems.append(
            f"lengths are {np.asarray(mine.length).tolist()}, plain's "
            f"{np.asarray(theirs.length).tolist()}"
        )
    distances, same = _distances(mine, theirs, jnp.int32(context), count)
    for name, value in distances.items():
        verdict.note(f"{name}_error", float(value), tolerance)
    if not bool(same):
        verdict.problems.append("attention rows of the earlier context have changed")


def _rows(bench: Bench, layers: tuple[int, ...], row: int) -> list[Array]:
    R = bench.arm.policy.read(bench.held.state.recurrent)
    return [R[layer, row] for layer in layers]


@jax.jit
def _compare_logits(
    logits: Array, node: Array, other: Array, plain: Array
) -> tuple[Array, Array, Array]:
    """Relative RMS of a node's logits [B, N, V] from plain's [B, V]; by how much plain prefers its
    own argmax to the node's; and the relative RMS of another node's. The worst of the batch, of
    the last the least."""
    mine, others = logits[:, node], logits[:, other]
    scale = jnp.linalg.norm(plain, axis=-1)
    best = jnp.take_along_axis(plain, jnp.argmax(mine, axis=-1)[:, None], axis=-1)[:, 0]
    margin = (plain.max(axis=-1) - best).max()
    error = (jnp.linalg.norm(mine - plain, axis=-1) / scale).max()
    return error, margin, (jnp.linalg.norm(others - plain, axis=-1) / scale).min()


@functools.partial(jax.jit, static_argnames="count")
def _distances(
    mine: State, theirs: State, context: Array, count: int
) -> tuple[dict[str, Array], Array]:
    """The largest relative RMS over layers of R, of convolution history and of ``count`` attention
    rows behind the context; and whether the rows before it are the same bits."""

    def distance(a: Array, b: Array) -> Array:
        axes = tuple(range(1, a.ndim))
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.sqrt(jnp.sum((a - b) ** 2, axis=axes) / jnp.sum(b**2, axis=axes)).max()

    def new(rows: Array) -> Array:
        return lax.dynamic_slice_in_dim(rows, context, count, axis=2)

    pairs = ((mine.keys, theirs.keys), (mine.values, theirs.values))
    earlier = jnp.arange(mine.keys.shape[2])[None, None, :, None, None] < context
    R = mine.policy.read(mine.recurrent), theirs.policy.read(theirs.recurrent)
    return {
        "state": distance(*R),
        "conv": distance(mine.conv, theirs.conv),
        "kv": jnp.maximum(*(distance(new(a), new(b)) for a, b in pairs)),
    }, jnp.stack([jnp.where(earlier, a == b, True).all() for a, b in pairs]).all()
