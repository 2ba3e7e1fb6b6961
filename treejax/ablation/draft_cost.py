"""What drafting costs: head passes and the choice of candidates, without a model around them.

The MTP head, its embedding and its ``lm_head`` get random weights at the sizes of a model; each arm
proposes again and again below a prefix of random hidden rows. All arms are interleaved. Beside the
times stand the bytes of weights that the head passes read, and how long that many bytes take at the
bandwidth of a copy, whose reads and writes both count. Both hold for drafters of head passes alone,
one a depth; others are refused.

A proposal is checked before its time counts: its tokens must be tokens, siblings must differ, and
the likeliest path down must be the chain that the head drafts alone, as far as both go; in
bfloat16 two candidates may lie closer than rounding, so that only the first step is binding there.

A small version for a CPU: the TOML with a hidden size of 64, a vocabulary of 500, ``dtype =
"float32"`` and ``prefix = 32``.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from pallas_kernels.bench.timing import Timed
from treejax import parameters
from treejax.ablation.base import GREEN, RED, Cell, Context, Row
from treejax.ablation.lab_figures import draw_dots
from treejax.ablation.lab_run import by_cell, hide_red, leading, pooled, shown
from treejax.ablation.lab_timing import Time, copy_bandwidth, make_lead, measure
from treejax.config import LINEAR, ModelConfig, from_mapping
from treejax.drafters import MTP, Draft, Drafter, MTPTree, make_drafter
from treejax.model import Model
from treejax.sampling import Sampling, per_sequence
from treejax.tree import Tree

HEADS = (MTP.name, MTPTree.name)
"""Drafters whose proposals are head passes alone, one a depth."""

PRIMED = 256  # rows of prefix that enter the head's cache at a time


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """The head's layer and the two tables around it."""

    hidden_size: int = 5120
    intermediate_size: int = 17408
    heads: int = 24
    key_value_heads: int = 4
    head_dim: int = 256
    vocabulary: int = 248_320
    dtype: str = "bfloat16"

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            family="qwen3_5",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            layer_types=(LINEAR,),
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            rotary_dim=self.head_dim // 4,
            max_position_embeddings=1 << 18,
            mtp_num_hidden_layers=1,
        )

    def model(self, seed: int) -> Model:
        """Random weights for the head and the tables, on the device; there are no layers."""
        wanted = parameters.abstract(self.config, self.dtype)
        names = [name for name in ("mtp", "embed", "lm_head") if name in wanted]
        leaves, treedef = jax.tree.flatten({name: wanted[name] for name in names})
        keys = jax.random.split(jax.random.key(seed), len(leaves))

        def fill(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if len(leaf.shape) == 1:
                return jnp.zeros(leaf.shape, leaf.dtype)
            drawn = jax.random.normal(key, leaf.shape, leaf.dtype)
            return drawn * jnp.asarray(leaf.shape[-2] ** -0.5, leaf.dtype)

        make = jax.jit(fill, static_argnums=1)
        made = [make(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
        return Model(jax.tree.unflatten(treedef, made), self.config)


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """The experiment's settings.

    Attributes:
      drafts: "drafter:tree" of ``mtp`` and ``mtp_tree``; each is compared with the chain of its
        depth.
      batches: sequences. prefix: rows in the head's cache.
      temperatures: of the target; 0 is greedy.
    """

    name: ClassVar[str] = "draft_cost"
    options: ClassVar[frozenset[str]] = frozenset()
    always: ClassVar[tuple[str, ...]] = ()
    ends_itself: ClassVar[bool] = True

    seed: int
    repeats: int
    drafts: tuple[str, ...]
    sizes: HeadSizes
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    prefix: int = 1024
    warm_up: int = 5
    rounds: int = 15

    @classmethod
    def from_toml(cls, table: dict[str, Any], where: str) -> "DraftCost":
        made = from_mapping(cls, table, where)
        for draft in made.drafts:
            try:
                made._drafter(draft)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        return made

    def _drafter(self, draft: str) -> Drafter:
        name, _, tree = draft.partition(":")
        if name.partition("@")[0].strip() not in HEADS:
            raise ValueError(
                f"draft {draft!r} is not made of head passes alone, expected one of: "
                f"{', '.join(HEADS)}"
            )
        return make_drafter(name, tree or None)

    @property
    def arms(self) -> dict[str, Drafter]:
        """The drafts, and the chain of each depth that they are compared with."""
        made = {draft: self._drafter(draft) for draft in self.drafts}
        for drafter in list(made.values()):
            chain = MTP(f"chain{drafter.max_depth}")
            made.setdefault(f"mtp:{chain.tree}", chain)
        return made

    def cells(self, context: Context) -> list[Cell]:
        return [
            Cell(arm, {"batch": batch, "temperature": str(temperature)}, repeat)
            for batch in self.batches
            for temperature in self.temperatures
            for repeat in range(self.repeats)
            for arm in self.arms
        ]

    def run(self, context: Context, cells: Sequence[Cell], done: Sequence[Row]) -> Iterator[Row]:
        model, lead, bandwidth = self.sizes.model(self.seed), make_lead(), copy_bandwidth()
        groups = dict.fromkeys((c.key["batch"], c.key["temperature"]) for c in cells)
        for at, (batch, temperature) in enumerate(groups):
            context.advance(f"batch {batch}, temperature {temperature}", at, len(groups))
            mine = [
                c for c in cells if (c.key["batch"], c.key["temperature"]) == (batch, temperature)
            ]
            yield from self._run_group(context, model, mine, lead, bandwidth)
            if context.over():
                return

    def _run_group(
        self, context: Context, model: Model, cells: Sequence[Cell], lead: Any, bandwidth: float
    ) -> Iterator[Row]:
        batch = int(cells[0].key["batch"])
        sampling = Sampling(float(cells[0].key["temperature"]))
        wanted = dict.fromkeys(cell.arm for cell in cells)
        arms = {name: drafter for name, drafter in self.arms.items() if name in wanted}
        proposals, problems = {}, {}
        for name, drafter in arms.items():
            context.say(f"compile {name}, batch {batch}, temperature {sampling.temperature}")
            proposals[name] = Proposal(drafter, model, batch, self.prefix, sampling, self.seed)
        chains = {
            d.max_depth: proposals[n].tree() for n, d in arms.items() if n.startswith("mtp:chain")
        }
        exact = self.sizes.dtype == "float32"
        for name, drafter in arms.items():
            chain = chains.get(drafter.max_depth)
            problems[name] = check(proposals[name].tree(), model, chain, drafter.proposals, exact)
        green = [name for name in arms if problems[name] is None]
        for repeat in sorted({cell.repeat for cell in cells}):
            mine = [cell for cell in cells if cell.repeat == repeat]
            timed = [proposals[c.arm].timed(c.arm) for c in mine if c.arm in green]
            times = measure(timed, lead, self.warm_up, self.rounds, lambda done: None)
            for cell in mine:
                time = times.get(cell.arm)
                if not isinstance(time, Time):
                    yield cell.row(RED, problems[cell.arm] or str(time))
                    continue
                drafter = arms[cell.arm]
                read = drafter.max_depth * head_bytes(model)
                yield cell.row(
                    GREEN,
                    None,
                    time.measures("draft")
                    | {"nodes": drafter.capacity - 1, "depth": drafter.max_depth}
                    | {"model_mb": read / 1e6, "model_ms": 1e3 * read / bandwidth}
                    | {"rounds": time.rounds, "calls": time.calls},
                )

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        made = []
        for (arm, batch, temperature), mine in by_cell(
            hide_red(rows), ("batch", "temperature")
        ).items():
            first = leading(mine)
            line = {"arm": arm, "batch": batch, "temperature": temperature}
            line |= {"gate": first["gate"], "problem": first["problem"]}
            line |= pooled(mine, "draft_ms")
            for name in ("nodes", "depth", "model_mb", "model_ms"):
                line[name] = first.get(name)
            made.append(line)
        for line in made:
            place = f"mtp:chain{line['depth']}", line["batch"], line["temperature"]
            chain = [x for x in made if (x["arm"], x["batch"], x["temperature"]) == place]
            both = chain and chain[0]["draft_ms"] and line["draft_ms"]
            line["times_chain"] = line["draft_ms"] / chain[0]["draft_ms"] if both else None
        return made

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        s = self.sizes
        table = Table(
            title=f"drafting, hidden {s.hidden_size}, vocabulary {s.vocabulary:,}, {s.dtype}, "
            f"{self.prefix} rows of prefix"
        )
        for head in ("arm", "batch", "temperature", "nodes", "depth", "ms", "range"):
            table.add_column(head, justify="left" if head == "arm" else "right")
        for head in ("times the chain of its depth", "weights read, MB", "ms to read them"):
            table.add_column(head, justify="right")
        for line in self.summary(rows):
            heads = [line["arm"], str(line["batch"]), line["temperature"]]
            if line["gate"] != GREEN:
                table.add_row(*heads, str(line["problem"]))
                continue
            table.add_row(
                *heads,
                *(str(line["nodes"]), str(line["depth"]), shown(line["draft_ms"])),
                f"{line['draft_ms_min']:.3g}-{line['draft_ms_max']:.3g}",
                shown(line["times_chain"]),
                *(shown(line["model_mb"], ",.0f"), shown(line["model_ms"])),
            )
        return [table]

    def figures(self, rows: Sequence[Row], out: Path) -> None:
        green = [line for line in self.summary(rows) if line["draft_ms"] is not None]
        names = [f"{x['arm']}, B={x['batch']}, T={x['temperature']}" for x in green]
        points = [(x["draft_ms"], x["draft_ms_min"], x["draft_ms_max"]) for x in green]
        draw_dots(out / "draft_cost", names, {"ms a proposal": {"median": points}})


class Proposal:
    """One drafter's ``propose`` as a compiled program, its memory going round."""

    def __init__(
        self, drafter: Drafter, model: Model, batch: int, prefix: int, sampling: Sampling, seed: int
    ):
        draft = drafter.init(model, batch, prefix + drafter.max_depth + 2)
        random = np.random.default_rng(seed)
        shape = (batch, PRIMED, model.config.hidden_size)
        hidden = jnp.asarray(random.standard_normal(shape), model.dtype)
        prime = jax.jit(drafter.prime)
        for start in range(0, prefix, PRIMED):
            tokens = random.integers(0, model.config.vocab_size, (batch, PRIMED))
            counts = jnp.full(batch, min(PRIMED, prefix - start), jnp.int32)
            draft = prime(draft, hidden, jnp.asarray(tokens, jnp.int32), counts)
        keys = jnp.stack([jax.random.key(seed)] * batch)
        length = jnp.full(batch, prefix, jnp.int32)
        sampling, noisy, _ = per_sequence(batch, sampling, keys, length, model.config.vocab_size)
        self._memory = draft.memory
        self._fixed = draft.weights, jnp.arange(batch, dtype=jnp.int32), length, sampling, noisy

        def propose(memory: Any, weights: Any, pending: Any, length: Any, sampling: Any, keys: Any):
            given = Draft(weights, memory, model.config, sampling)
            tree, _, after = drafter.propose(given, SimpleNamespace(length=length), pending, keys)
            return tree, after.memory

        self._propose = jax.jit(propose, donate_argnums=0)

    def tree(self) -> Tree:
        tree, self._memory = self._propose(self._memory, *self._fixed)
        return tree

    def timed(self, name: str) -> Timed:
        def run(calls: int) -> Callable[[], Any]:
            tree = None
            for _ in range(calls):
                tree = self.tree()
            return lambda: jax.block_until_ready((tree, self._memory))

        return Timed(name, run)


def head_bytes(model: Model) -> int:
    """Bytes of weights that one head pass and its ``lm_head`` product read."""
    table = model.params.get("lm_head", model.params["embed"])
    return table.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(model.params["mtp"]))


def check(tree: Tree, model: Model, chain: Tree | None, proposals: str, exact: bool) -> str | None:
    """What is wrong with a proposal, or None."""
    for b in range(tree.batch):
        size = int(tree.size[b])
        tokens, parent = np.asarray(tree.tokens[b, :size]), np.asarray(tree.parent[b, :size])
        if tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
            return f"sequence {b} holds {tokens.min()}..{tokens.max()}, which are no tokens"
        pairs = set(zip(parent.tolist(), tokens.tolist(), strict=True))
        if proposals != "iid" and len(pairs) < size:
            return f"sequence {b} has equal siblings"
        if proposals == "fixed" and chain is not None:
            best = _first_path(tokens, parent, np.asarray(tree.rank[b, :size]))
            alone = np.asarray(chain.tokens[b, 1:]).tolist()
            shared = len(best) if exact else 1
            if best[:shared] != alone[:shared]:
                return f"sequence {b} drafts {best}, the chain alone {alone}"
    return None


def _first_path(tokens: np.ndarray, parent: np.ndarray, rank: np.ndarray) -> list[int]:
    """Tokens below the root along the children of rank 0."""
    made, node = [], 0
    while True:
        below = np.flatnonzero((parent == node) & (rank == 0))
        if not below.size:
            return made
        node = int(below[0])
        made.append(int(tokens[node]))
