"""The package against Hugging Face's numbers: prefill, decode, tree and rule, under every policy.

All cases of a preset run in one batch of unequal sequences, so a sequence also proves here that its
neighbours and its padding do not reach it. The tree is verified in nine packings at once.
"""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_trees
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from oracle import path_to
from oracle_model import OracleModel
from stepping import DEFERRED, Surfaces, choose, decode, oracle_row

from treejax import layers
from treejax.checkpoint import load_model
from treejax.delta_rule import Operands, chunked
from treejax.layers import l2_normalise
from treejax.model import prefill
from treejax.policies import REGISTRY, Path, make_policy
from treejax.state import init_state, with_policy
from treejax.steps.publish import publish
from treejax.steps.select import select
from treejax.steps.verify import verify
from treejax.tree import Tree, describe

# The tolerance is ten times what another order of summation moves, far above such roundings.
pytestmark = pytest.mark.compiles_fast

BATCH, WIDTH, ROWS = 9, 130, 160  # sequences, longest prompt, cache rows
CAPACITY, MAX_DEPTH = 12, 5  # of the tree, which has nine nodes of depth at most 3

close = functools.partial(np.testing.assert_allclose, rtol=0, atol=golden.TOLERANCE)
presets = pytest.mark.parametrize("preset", golden.PRESETS)
policies = pytest.mark.parametrize("policy", REGISTRY)
pairs = pytest.mark.parametrize(
    ("preset", "policy"),
    # Every policy on two families, one with experts; what the other two change, names of tensors
    # and experts again, no policy sees.
    [(p, policy) for p in ("qwen3_next", "qwen3_5") for policy in REGISTRY]
    + [(p, policy) for p in ("qwen3_5_wrapped", "qwen3_5_moe") for policy in ("replay", "wy")],
)


@functools.cache
def model_of(preset):
    return load_model(golden.checkpoint(preset), dtype="float32")


@functools.cache
def sequences(preset):
    """(case, index, prompt, tokens to decode) of every sequence in golden.npz: nine of them."""
    arrays = golden.arrays(preset, "golden")
    made = []
    for case in sorted({key.split("/")[0] for key in arrays} - {"leftpad", "generate"}):
        for b, prompt in enumerate(arrays[f"{case}/ids"]):
            made.append((case, b, prompt, arrays[f"{case}/decode_ids"][b]))
    nothing = np.zeros(0, int)
    for b, mask in enumerate(arrays["leftpad/attention_mask"].astype(bool)):
        made.append(("leftpad", b, arrays["leftpad/ids"][b][mask], nothing))
    made.append(("generate", 0, arrays["generate/prompt"], nothing))
    assert len(made) == BATCH
    return made


def pad(prompts):
    tokens = np.zeros((BATCH, WIDTH), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts])


@functools.cache
def prefilled(preset):
    model = model_of(preset)
    state = init_state(model.config, BATCH, ROWS)
    return prefill(model, state, *pad([s[2] for s in sequences(preset)]), hidden="all")


def check_states(arrays, prefix, surfaces, row, first, pick):
    """Compare sequence ``row`` with the arrays under ``prefix``; ``pick`` indexes them.

    Attention rows are compared from ``first`` on.
    """
    length = surfaces.length[row]
    for i, R in surfaces.R.items():
        at = f"{prefix}layer{i}."
        close(R[row], golden.recurrent(arrays[at + "recurrent_state"][pick]), err_msg=at)
        close(surfaces.C[i][row], golden.history(arrays[at + "conv_state"][pick]), err_msg=at)
    for i, K in surfaces.K.items():
        at = f"{prefix}layer{i}."
        for name, ours in (("key", K), ("value", surfaces.V[i])):
            theirs = golden.rows(arrays[at + name][pick[-1]])
            close(ours[row, first:length], theirs[: length - first], err_msg=at + name)


@presets
def test_prefill(preset):
    model, arrays = model_of(preset), golden.arrays(preset, "golden")
    out, state = prefilled(preset)
    all_logits = np.asarray(jax.jit(layers.logits)(model.params, out.hidden))
    surfaces = Surfaces(state)
    for row, (case, b, prompt, _) in enumerate(sequences(preset)):
        length = len(prompt)
        assert surfaces.length[row] == length
        close(out.logits[row], all_logits[row, length - 1])
        if case == "generate":
            assert np.argmax(out.logits[row]) == arrays["generate/tokens"][0]
            continue
        real = slice(None) if case != "leftpad" else arrays["leftpad/attention_mask"][b] == 1
        close(all_logits[row, :length], arrays[f"{case}/logits"][b][real], err_msg=case)
        if case != "leftpad":
            close(out.hidden[row, :length], arrays[f"{case}/last_hidden"][b], err_msg=case)
            check_states(arrays, f"{case}/", surfaces, row, 0, (b,))
            continue
        for i, R in surfaces.R.items():
            at = f"leftpad/layer{i}."
            close(R[row], golden.recurrent(arrays[at + "recurrent_state"])[b])
            close(surfaces.C[i][row], golden.history(arrays[at + "conv_state"])[b])
        for i, K in surfaces.K.items():
            at = f"leftpad/layer{i}."
            close(K[row, :length], golden.rows(arrays[at + "key"])[b][real])
            close(surfaces.V[i][row, :length], golden.rows(arrays[at + "value"])[b][real])


@pairs
def test_decode_and_greedy_generation(preset, policy):
    """Token by token: replay in trees of capacity 1, the others in one of 12 with 11 idle rows."""
    shape = (1, 0) if policy == "replay" else (CAPACITY, MAX_DEPTH)
    model, arrays = model_of(preset), golden.arrays(preset, "golden")
    out, state = prefilled(preset)
    state = with_policy(state, policy)
    lengths = np.array([len(prompt) for _, _, prompt, _ in sequences(preset)])
    generated = [int(np.argmax(out.logits[BATCH - 1]))]
    for step in range(len(arrays["generate/tokens"]) - 1):
        active = [step < len(todo) for *_, todo in sequences(preset)]
        tokens = [todo[step] if step < len(todo) else 0 for *_, todo in sequences(preset)]
        active[-1], tokens[-1] = True, generated[-1]
        before = state
        logits, state = decode(model, state, tokens, active, *shape)
        generated.append(int(np.argmax(logits[-1])))
        if not any(active[:-1]):
            continue
        surfaces, old = Surfaces(state), Surfaces(before)
        for row, (case, b, *_) in enumerate(sequences(preset)[:-1]):
            if active[row]:
                close(logits[row], arrays[f"{case}/decode_logits"][b, step], err_msg=case)
                pick = (step, b)
                check_states(arrays, f"{case}/decode.", surfaces, row, lengths[row], pick)
            else:  # byte for byte as it was
                for name, array in old.row(row).items():
                    loose = 1e-6 if policy in DEFERRED and name[0] == "R" else 0.0
                    np.testing.assert_allclose(surfaces.row(row)[name], array, loose, loose)
    np.testing.assert_array_equal(generated, arrays["generate/tokens"])


@functools.cache
def packings(preset):
    """(parents, order) of the golden tree: as stored, children first, and seven shuffles."""
    parents, rng = golden.arrays(preset, "tree")["parents"].tolist(), np.random.default_rng(6)
    made = [(parents, np.arange(len(parents))), random_trees.children_first(parents)]
    made += [random_trees.shuffle(parents, rng) for _ in range(BATCH - 2)]
    backwards = [any(p > row for row, p in enumerate(packed)) for packed, _ in made]
    assert not backwards[0] and sum(backwards) >= 7  # parents do come after their children
    return made


@pairs
def test_tree(preset, policy):
    model, arrays = model_of(preset), golden.arrays(preset, "tree")
    prefix, parents = arrays["prefix_ids"], arrays["parents"].tolist()
    empty = init_state(model.config, BATCH, ROWS)
    out, state = prefill(model, empty, *pad([prefix] * BATCH))
    close(out.logits, np.tile(arrays["prefix.logits"], (BATCH, 1)))
    state = with_policy(state, policy)
    orders = [order for _, order in packings(preset)]
    tree = Tree.from_parents(
        [arrays["tokens"][order] for order in orders],
        [packed for packed, _ in packings(preset)],
        capacity=CAPACITY,
        max_depth=MAX_DEPTH,
        vocabulary=model.config.vocab_size,
    )
    out, scratch = verify(model, state, tree)
    for b, order in enumerate(orders):
        close(out.logits[b, : len(order)], arrays["logits"][order])
        close(out.hidden[b, : len(order)], arrays["last_hidden"][order])

    # Sequence b publishes the path to node b of the stored tree, whatever row it lies in.
    targets = [path_to(parents, node) for node in range(BATCH)]
    rows = [np.argsort(order)[path] for order, path in zip(orders, targets, strict=True)]
    published = publish(model, state, tree, scratch, choose(rows, MAX_DEPTH))
    check_published(arrays, Surfaces(published), targets, len(prefix))

    choice = select(tree, out.logits)
    accepted = arrays["accept_path"]
    np.testing.assert_array_equal(choice.length, len(accepted))
    np.testing.assert_array_equal(choice.pending, arrays["bonus_token"])
    for b, order in enumerate(orders):
        np.testing.assert_array_equal(order[choice.path[b, : len(accepted)]], accepted)
    published = publish(model, state, tree, scratch, choice)
    check_published(arrays, Surfaces(published), [accepted.tolist()] * BATCH, len(prefix))


def check_published(arrays, surfaces, targets, prefix):
    """The states of each target's last node, and the attention rows of its whole path."""
    for b, path in enumerate(targets):
        assert surfaces.length[b] == prefix + len(path)
        for i, R in surfaces.R.items():
            at, node = f"layer{i}.", path[-1]
            close(R[b], golden.recurrent(arrays[at + "recurrent_state"])[node], err_msg=at)
            close(surfaces.C[i][b], golden.history(arrays[at + "conv_state"])[node], err_msg=at)
        for i, K in surfaces.K.items():
            for name, ours in (("key", K[b]), ("value", surfaces.V[i][b])):
                old = golden.rows(arrays[f"prefix.layer{i}.{name}"])
                new = arrays[f"layer{i}.{name}"][path]
                close(ours[: prefix + len(path)], np.concatenate([old, new]), err_msg=name)


@functools.cache
def oracle_steps(*steps, number):
    """What the oracle makes of trees in nine sequences, step after step, each ending at some node.

    Per step (tokens, runs of every node, node accepted), each a list over the sequences. Cached
    because every policy is given the same trees.
    """
    oracle, rng = OracleModel(golden.checkpoint("qwen3_5")), np.random.default_rng(number)
    prefix = golden.arrays("qwen3_5", "tree")["prefix_ids"]
    caches, made = [oracle.forward(prefix).cache] * BATCH, []
    for lists in steps:
        tokens = [random_trees.random_tokens(rng, p, oracle.config["vocab_size"]) for p in lists]
        last = [int(rng.integers(len(parents))) for parents in lists]
        runs = [oracle.tree(*one) for one in zip(caches, tokens, lists, strict=True)]
        caches = [run[node].cache for run, node in zip(runs, last, strict=True)]
        made.append((tokens, runs, last))
    return made


batch_of_trees = st.lists(
    random_trees.parent_lists(CAPACITY, MAX_DEPTH), min_size=BATCH, max_size=BATCH
)


@policies
@seed(1)  # the same trees for every policy
@settings(max_examples=4)
@given(batch_of_trees, batch_of_trees, st.integers(0, 2**32 - 1))
def test_two_steps_of_random_trees_against_the_oracle(policy, first, second, number):
    """Nine different trees at once, one published path each, and nine more from where it led."""
    model = model_of("qwen3_5")
    prefix = golden.arrays("qwen3_5", "tree")["prefix_ids"]
    _, state = prefill(model, init_state(model.config, BATCH, ROWS), *pad([prefix] * BATCH))
    state = with_policy(state, policy)
    steps = [tuple(map(tuple, lists)) for lists in (first, second)]
    for lists, (tokens, runs, last) in zip(steps, oracle_steps(*steps, number=number), strict=True):
        tree = Tree.from_parents(tokens, lists, capacity=CAPACITY, max_depth=MAX_DEPTH)
        out, scratch = verify(model, state, tree)
        for b, parents in enumerate(lists):
            close(out.logits[b, : len(parents)], [run.logits[-1] for run in runs[b]])
            close(out.hidden[b, : len(parents)], [run.hidden[-1] for run in runs[b]])
        paths = [path_to(parents, node) for parents, node in zip(lists, last, strict=True)]
        state = publish(model, state, tree, scratch, choose(paths, MAX_DEPTH))
        surfaces = Surfaces(state)
        for b, node in enumerate(last):
            row, expected = surfaces.row(b), oracle_row(runs[b][node].cache)
            assert row.keys() == expected.keys()
            for name, array in expected.items():
                close(row[name], array, err_msg=name)


def rule_operands(arrays):
    """gdn_op.npz as operands [B, S, ..] and the initial states, in our layout."""
    width = arrays["query"].shape[-1]
    operands = Operands(
        q=l2_normalise(jnp.asarray(arrays["query"])) * width**-0.5,
        k=l2_normalise(jnp.asarray(arrays["key"])),
        v=jnp.asarray(arrays["value"]),
        g=jnp.asarray(arrays["g"]),
        alpha=jnp.exp(arrays["g"]),
        beta=jnp.asarray(arrays["beta"]),
    )
    return operands, jnp.asarray(golden.recurrent(arrays["initial_state"]))


# Compiled once for all presets, whose operands have the same shapes.
in_chunks = jax.jit(jax.vmap(chunked))


@functools.partial(jax.jit, static_argnames="policy")
def as_a_chain(policy, carry, operands, tree, path):
    out, scratch, carry = policy.scan(carry, 0, operands, policy.plan(describe(tree)))
    return out, policy.read(policy.commit(carry, (scratch,), path))[0]


@presets
def test_gated_delta_rule_in_chunks(preset):
    arrays = golden.arrays(preset, "gdn_op")
    operands, R = rule_operands(arrays)
    out, final = in_chunks(R, operands)
    close(out, arrays["out"])
    close(final, golden.recurrent(arrays["final_state"]))


@presets
@policies
def test_gated_delta_rule_as_a_chain(preset, policy):
    """The same sequence as one long path of a tree, its last node accepted."""
    arrays, policy = golden.arrays(preset, "gdn_op"), make_policy(policy)
    operands, R = rule_operands(arrays)
    batch, length = arrays["g"].shape[:2]
    parents = [list(range(-1, length - 1))] * batch
    tree = Tree.from_parents([range(length)] * batch, parents, capacity=length)
    nodes = jnp.tile(jnp.arange(length, dtype=jnp.int32), (batch, 1))
    path = Path(nodes, jnp.full(batch, length, jnp.int32))
    carry = policy.init(R[None], operands.k.shape[2])
    out, final = as_a_chain(policy, carry, operands, tree, path)
    close(out, arrays["out"])
    close(final, golden.recurrent(arrays["final_state"]))
