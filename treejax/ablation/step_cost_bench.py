"""One arm of ``step_cost`` with its state: the whole step, its phases, and visits of a host.

The state is random and as large as the largest context that will be measured; a context is its
length, which is data. What a script accepts is data too: the place in its schedule.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treejax.ablation import step_cost_phases as phases
from treejax.ablation.lab_programs import Programs
from treejax.ablation.step_cost_arms import RUN, Arm
from treejax.ablation.step_cost_model import REFRAIN, ModelSizes, make_state
from treejax.ablation.step_cost_switches import Whole, make_whole
from treejax.drafters import Draft
from treejax.drafters.head_cache import HeadMemory
from treejax.drafters.scripted import Script
from treejax.model import Model
from treejax.sampling import Sampling
from treejax.state import State, abstract_state
from treejax.steps.many import Visit, end_tokens, steps
from treejax.steps.rules import rule_for
from treejax.steps.select import Choice
from treejax.steps.together import Carry, Emission
from treejax.steps.visits import choose_loop
from treejax.tree import Tree

NO_END = 1 << 30
"""Tokens that a sequence may still emit."""


class Bench:
    """An arm at a batch and a number of rows of its state.

    Attributes:
      rows: tokens that the state has room for.
      looped: whether the loop's own program is there too; not with a change undone.
      steps_a_visit: that the loop makes by that program.
      compile_s: seconds to lower and compile, by program, once compiled.
      temporary_bytes: of the whole step, beside arguments and results.
      carry: None while no state is held.
    """

    def __init__(
        self,
        arm: Arm,
        model: Model,
        sizes: ModelSizes,
        batch: int,
        rows: int,
        seed: int,
        looped: bool = False,
    ):
        self.looped = looped and arm.off is None
        self.arm, self.model, self.sizes, self.batch = arm, model, sizes, batch
        self.rows, self.seed = rows, seed
        self.name, self.drafter = arm.name, arm.drafter
        config = model.config
        self.rule = rule_for("match", self.drafter.proposals, self.drafter.shape)
        self.sampling = jax.device_put(Sampling().prepared(config.vocab_size))
        self.keys = jnp.stack([jax.random.key(seed)] * batch)
        self.limit = np.full(batch, self.drafter.max_depth, np.int32)
        R = abstract_state(config, batch, rows)["R"]
        self.split = Programs.of(arm.policy, R, config.linear_num_key_heads)
        self.compile_s: dict[str, float] = {}
        self.temporary_bytes: int | None = None
        self.carry: Carry | None = None
        self._weights: Any = None
        self.whole: Whole = make_whole(arm, self.rule, config)
        self._ends = end_tokens([set()] * batch)
        # Where the loop would find out by its clock, two: steps of 14 to 20 ms.
        looped, chosen = choose_loop(model, None)
        self._how = config, self.drafter, self.rule, looped
        self.steps_a_visit = chosen or 2

    # What is held

    def hold(self) -> None:
        """A fresh random state, and a drafter's memory that fits it."""
        self.release()
        make = functools.partial(_begin, self.arm, self.model, self.sizes, self.batch, self.rows)
        self.carry, self._weights = make(self.seed)

    def release(self) -> None:
        for leaf in jax.tree.leaves(self.carry):
            leaf.delete()
        self.carry = None

    @property
    def held(self) -> Carry:
        assert self.carry is not None, f"{self.name}: no state is held"
        return self.carry

    def rewind(self, context: int, length: int | None = None) -> None:
        """Begin again behind ``context`` tokens, the pending one the refrain. A script then
        accepts ``length`` - 1 candidates in each of the next ``RUN`` steps."""
        lengths = self.arm.lengths
        at = lengths.index(length) * RUN if length in lengths else 0
        held, batch = self.held, self.batch
        self.carry = held.replace(
            state=held.state.replace(length=jnp.full(batch, context, jnp.int32)),
            memory=_rewound(held.memory, context, at),
            pending=jnp.full(batch, REFRAIN, jnp.int32),
        )

    # What is run

    def step(self) -> Emission:
        """The whole step, the state going round."""
        self.carry, emission = self.whole(self.fixed, self.held, self.limit)
        return emission

    def visit(self) -> int:
        """A step as a host makes it that waits for what was emitted: how many tokens."""
        return int(np.asarray(jax.device_get(self.step()).count).sum())

    def loop(self, count: int) -> Visit:
        """``count`` steps, as the loop makes them between two visits."""
        left = jnp.full(self.batch, NO_END, jnp.int32)
        given = self.model.params, self._weights, self.held, left, self.keys, self.sampling
        self.carry, _, visit = steps(
            *(*self._how, *given, np.bool_(False), self._ends),
            *(np.zeros(self.batch, bool), np.int32(count), np.bool_(False)),
        )
        return visit

    def verify(self, tree: Tree, marks: Any = None) -> phases.Verified:
        """The state stays as it is, but for what a policy writes while it verifies; ``marks`` in
        place of the carry's own."""
        floats, own = self.split.split(self.held.state.recurrent)
        own = own if marks is None else marks
        rest = self.held.state.replace(recurrent=())
        made = phases.verify(
            *(self.model.config, self.split, self.model.params, floats, own, rest, tree)
        )
        self._set(rest.replace(recurrent=self.split.join(*made.carry)))
        return made

    def choose(self, tree: Tree, logits: Any) -> Choice:
        how = self.sampling, self.keys, self.held.state.length
        return phases.choose(self.rule, tree, logits, *how)

    def publish(self, scratch: Any, choice: Choice, marks: Any = None) -> None:
        floats, own = self.split.split(self.held.state.recurrent)
        own = own if marks is None else marks
        rest = self.held.state.replace(recurrent=())
        carry, rest = phases.publish(self.split, floats, own, rest, scratch, choice)
        self._set(rest.replace(recurrent=self.split.join(*carry)))

    def propose(self) -> Tree:
        held = self.held
        draft = Draft((), held.memory, self.model.config)
        rest = held.state.replace(recurrent=())
        how = rest, held.pending, self.keys, self.sampling
        tree, draft = phases.propose(self.drafter, self._weights, draft, *how)
        self.carry = held.replace(memory=draft.memory)
        return tree

    @property
    def marks(self) -> tuple[Any, ...]:
        return self.split.split(self.held.state.recurrent).marks

    @property
    def fixed(self) -> tuple[Any, ...]:
        """What the whole step takes around carry and limit."""
        return self.model.params, self._weights, self.keys, self.sampling

    def _set(self, state: State) -> None:
        self.carry = self.held.replace(state=state)

    # What is compiled

    def jobs(self, split: bool) -> dict[str, Callable[[], Any]]:
        """By program, what lowers it; ``split`` adds the phases to the whole step."""
        config = self.model.config
        carry, weights = self._abstract
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.model.params)
        fixed = params, weights, self.keys, self.sampling
        jobs = {
            name: functools.partial(self._lower_whole, at, fixed, carry)
            for at, name in enumerate(self.whole.names)
        }
        if self.looped:
            jobs["loop"] = functools.partial(self._lower_loop, params, weights, carry)
        if not split:
            return jobs
        rest = carry.state.replace(recurrent=())
        floats, marks = self.split.split(carry.state.recurrent)
        tree = self.abstract_tree()
        given = params, floats, marks, rest, tree
        made = jax.eval_shape(functools.partial(phases.verify, config, self.split), *given)
        one = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        choice = jax.eval_shape(lambda: path_choice([0], self.batch, tree.max_depth + 1))
        how = self.sampling, self.keys, one
        draft = jax.eval_shape(lambda memory: Draft((), memory, config), carry.memory)
        return jobs | {
            "verify": lambda: phases.verify.lower(config, self.split, *given),
            "select": lambda: phases.choose.lower(self.rule, tree, made.output.logits, *how),
            "publish": lambda: phases.publish.lower(
                *(self.split, *made.carry, rest, made.scratch, choice)
            ),
            "draft": lambda: phases.propose.lower(
                *(self.drafter, weights, draft, rest, one, self.keys, self.sampling)
            ),
        }

    def abstract_state(self) -> State:
        """Shapes of the state."""
        return self._abstract[0].state

    def abstract_tree(self) -> Tree:
        """Shapes of the trees."""
        shape = self.batch, self.arm.tree.capacity
        return jax.eval_shape(lambda: self.arm.tree.full(jnp.zeros(shape, jnp.int32)))

    @functools.cached_property
    def _abstract(self) -> tuple[Carry, Any]:
        """Shapes of the carry and of the drafter's weights."""
        begin = functools.partial(_begin, self.arm, sizes=self.sizes, batch=self.batch)
        config = self.model.config
        return jax.eval_shape(
            lambda params: begin(Model(params, config), rows=self.rows, seed=0), self.model.params
        )

    def _lower_whole(self, at: int, fixed: Any, carry: Any) -> Any:
        return self.whole.lower(at, fixed, carry, self.limit)

    def _lower_loop(self, params: Any, weights: Any, carry: Any) -> Any:
        flag, one = np.bool_(False), jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return steps.lower(
            *(*self._how, params, weights, carry, one),
            *(self.keys, self.sampling, flag, self._ends),
            *(np.zeros(self.batch, bool), np.int32(0), flag),
        )

    def keep(self, program: str, seconds: float, compiled: Any) -> None:
        """Note what compiling a program took and found."""
        self.compile_s[program] = seconds
        if program in self.whole.names:
            analysis = compiled.memory_analysis()
            if analysis is not None:
                temporary = int(analysis.temp_size_in_bytes)
                self.temporary_bytes = max(self.temporary_bytes or 0, temporary)


def _begin(
    arm: Arm, model: Model, sizes: ModelSizes, batch: int, rows: int, seed: int
) -> tuple[Carry, Any]:
    """A carry, and the drafter's weights."""
    state = make_state(model.config, sizes.dtype, batch, rows, arm.policy, seed)
    draft = arm.drafter.init(model, batch, rows)
    memory, weights = draft.memory, draft.weights
    if isinstance(memory, Script):  # the refrain as far as the state goes
        weights = jnp.full((batch, rows + arm.tree.max_depth + 1), REFRAIN, jnp.int32)
    if isinstance(memory, HeadMemory):  # rows like those that a norm and a projection leave
        shape, dtype = memory.keys.shape, memory.keys.dtype
        keys = [jax.random.fold_in(jax.random.key(seed), 100 + i) for i in range(3)]
        memory = memory.replace(
            keys=jax.random.normal(keys[0], shape, jnp.float32).astype(dtype),
            values=jax.random.normal(keys[1], shape, jnp.float32).astype(dtype),
            waiting=jax.random.normal(keys[2], memory.waiting.shape, jnp.float32).astype(dtype),
        )
    pending = jnp.full(batch, REFRAIN, jnp.int32)
    return Carry(state=state, memory=memory, pending=pending), weights


def _rewound(memory: Any, context: int, at: int) -> Any:
    """A drafter's memory behind ``context`` tokens, a script's at a place of its schedule."""
    if isinstance(memory, Script):
        batch = memory.step.shape
        return Script(jnp.zeros(batch, jnp.int32), jnp.full(batch, at, jnp.int32))
    if isinstance(memory, HeadMemory):  # one hidden row waits for the token after it
        batch = memory.rows.shape
        return memory.replace(
            rows=jnp.full(batch, context - 1, jnp.int32),
            count=jnp.ones(batch, jnp.int32),
            stored=jnp.zeros(batch, jnp.int32),
        )
    return memory


def path_choice(nodes: list[int], batch: int, bound: int) -> Choice:
    """The same path for every sequence, in ``bound`` places; pending is the refrain."""
    path = np.full((batch, bound), -1, np.int32)
    path[:, : len(nodes)] = nodes
    length = jnp.full(batch, len(nodes), jnp.int32)
    return Choice(jnp.asarray(path), length, jnp.full(batch, REFRAIN, jnp.int32))
