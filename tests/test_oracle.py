"""The oracle itself against the golden numbers: every array of every preset.

The oracle is float64 and the goldens float32, so the distance between them is the rounding of the
goldens, which is below 6e-5 in all presets; ``golden.TOLERANCE`` is what the package must meet.
"""

import functools

import golden
import numpy as np
import oracle
import pytest
from oracle_model import OracleModel

# transformers against itself differs by up to 4.0e-5; against float64 by 5.5e-5 at most.
ROUNDING = 1e-4


@functools.cache
def model(preset):
    return OracleModel(golden.checkpoint(preset))


def close(actual, expected, what):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=ROUNDING, err_msg=what)


class Checked(dict):
    """The arrays of one file, remembering which were compared."""

    def __init__(self, preset, name):
        super().__init__(golden.arrays(preset, name))
        self.left = set(self)

    def __getitem__(self, key):
        self.left.discard(key)
        return super().__getitem__(key)


def check_cache(model, arrays, prefix, cache, first=0, index=()):
    """Compare the three surfaces of ``cache`` with the golden arrays under ``prefix``."""
    for i in range(model.layers):
        at = f"{prefix}layer{i}."
        if model.is_linear[i]:
            close(cache.R[i], golden.recurrent(arrays[at + "recurrent_state"])[index], at + "R")
            close(cache.C[i], golden.history(arrays[at + "conv_state"])[index], at + "C")
        else:
            close(cache.K[i][first:], golden.rows(arrays[at + "key"][index]), at + "K")
            close(cache.V[i][first:], golden.rows(arrays[at + "value"][index]), at + "V")


def check_case(model, arrays, case):
    ids, steps = arrays[f"{case}/ids"], arrays[f"{case}/decode_ids"]
    for b in range(len(ids)):
        run = model.forward(ids[b])
        close(run.logits, arrays[f"{case}/logits"][b], case)
        close(run.hidden, arrays[f"{case}/last_hidden"][b], case)
        check_cache(model, arrays, f"{case}/", run.cache, index=(b,))
        if f"{case}/hidden_states" in arrays:
            stream = [*run.inputs, run.hidden]
            close(np.stack(stream), arrays[f"{case}/hidden_states"][:, b], case)
            first = model.is_linear.index(True)
            for name, values in run.traces[first].items():
                close(values, arrays[f"{case}/trace.layer{first}.{name}"][b], name)
            final = arrays[f"{case}/trace.layer{first}.final_state"]
            close(run.cache.R[first], golden.recurrent(final)[b], "final_state")
        cache = run.cache
        for t in range(steps.shape[1]):
            run = model.forward(steps[b, t : t + 1], cache)
            cache = run.cache
            close(run.logits[0], arrays[f"{case}/decode_logits"][b, t], f"{case} step {t}")
            for i in range(model.layers):
                at = f"{case}/decode.layer{i}."
                if model.is_linear[i]:
                    close(cache.R[i], golden.recurrent(arrays[at + "recurrent_state"])[t, b], at)
                    close(cache.C[i], golden.history(arrays[at + "conv_state"])[t, b], at)
                else:
                    close(cache.K[i][-1], arrays[at + "key"][b, :, t], at)
                    close(cache.V[i][-1], arrays[at + "value"][b, :, t], at)


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_oracle_prefill_decode_and_generation(preset):
    arrays, oracle_model = Checked(preset, "golden"), model(preset)
    cases = {key.split("/")[0] for key in arrays} - {"leftpad", "generate"}
    for case in sorted(cases):
        check_case(oracle_model, arrays, case)
    mask = arrays["leftpad/attention_mask"].astype(bool)
    for b, ids in enumerate(arrays["leftpad/ids"]):
        run = oracle_model.forward(ids[mask[b]])
        close(run.logits, arrays["leftpad/logits"][b][mask[b]], "leftpad")
        positions = arrays["leftpad/position_ids"][b][mask[b]]
        np.testing.assert_array_equal(positions, np.arange(run.cache.length))
        for i in range(oracle_model.layers):
            at = f"leftpad/layer{i}."
            if oracle_model.is_linear[i]:
                close(run.cache.R[i], golden.recurrent(arrays[at + "recurrent_state"])[b], at)
                close(run.cache.C[i], golden.history(arrays[at + "conv_state"])[b], at)
            else:
                close(run.cache.K[i], golden.rows(arrays[at + "key"])[b][mask[b]], at)
                close(run.cache.V[i], golden.rows(arrays[at + "value"])[b][mask[b]], at)
    prompt, tokens = arrays["generate/prompt"], arrays["generate/tokens"]
    run = oracle_model.forward(prompt)
    first = int(np.argmax(run.logits[-1]))
    rest, gap = oracle_model.greedy(run.cache, first, len(tokens) - 1)
    np.testing.assert_array_equal([first, *rest], tokens)
    assert gap > 10 * ROUNDING  # no choice hangs on rounding
    assert not arrays.left


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_oracle_tree(preset):
    arrays, oracle_model = Checked(preset, "tree"), model(preset)
    prefix = oracle_model.forward(arrays["prefix_ids"])
    close(prefix.logits[-1], arrays["prefix.logits"], "prefix")
    check_cache(oracle_model, arrays, "prefix.", prefix.cache)
    parents, length = arrays["parents"], prefix.cache.length
    runs = oracle_model.tree(prefix.cache, arrays["tokens"], parents)
    for node, run in enumerate(runs):
        path = oracle.path_to(parents, node)
        assert arrays["depth"][node] == oracle.depth_of(parents, node) == len(path) - 1
        assert arrays["position_ids"][node] == run.cache.length - 1 == length + len(path) - 1
        np.testing.assert_array_equal(np.flatnonzero(arrays["ancestors"][node]), sorted(path))
        close(run.logits[-1], arrays["logits"][node], f"node {node}")
        close(run.hidden[-1], arrays["last_hidden"][node], f"node {node}")
        for i in range(oracle_model.layers):
            at = f"layer{i}."
            if oracle_model.is_linear[i]:
                close(run.cache.R[i], golden.recurrent(arrays[at + "recurrent_state"])[node], at)
                close(run.cache.C[i], golden.history(arrays[at + "conv_state"])[node], at)
            else:
                close(run.cache.K[i][-1], arrays[at + "key"][node], at)
                close(run.cache.V[i][-1], arrays[at + "value"][node], at)
    accepted = [0]
    while True:
        best = int(np.argmax(runs[accepted[-1]].logits[-1]))
        below = [n for n in range(len(parents)) if parents[n] == accepted[-1]]
        matches = [n for n in below if arrays["tokens"][n] == best]
        if not matches:
            break
        accepted += matches
    np.testing.assert_array_equal(accepted, arrays["accept_path"])
    assert best == arrays["bonus_token"]
    assert not arrays.left


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_oracle_mtp_head(preset):
    arrays, oracle_model = Checked(preset, "mtp"), model(preset)
    run = oracle_model.forward(arrays["ids"])
    close(run.hidden, arrays["main_hidden"], "main_hidden")
    assert np.argmax(run.logits[-1]) == arrays["next_token"]
    tokens = np.append(arrays["ids"][1:], arrays["next_token"])
    hidden, logits, keys, values = oracle_model.mtp(run.hidden, tokens)
    close(hidden, arrays["hidden"], "hidden")
    close(logits, arrays["logits"], "logits")
    close(keys, golden.rows(arrays["key"]), "key")
    close(values, golden.rows(arrays["value"]), "value")
    drafts = [int(np.argmax(logits[-1]))]
    for step in range(len(arrays["chain_hidden"])):
        hidden, logits, keys, values = oracle_model.mtp(hidden[-1:], drafts[-1:], keys, values)
        close(hidden[0], arrays["chain_hidden"][step], "chain_hidden")
        close(logits[0], arrays["chain_logits"][step], "chain_logits")
        drafts.append(int(np.argmax(logits[0])))
    np.testing.assert_array_equal(drafts, arrays["draft_tokens"])
    assert not arrays.left


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_oracle_gated_delta_rule(preset):
    arrays = Checked(preset, "gdn_op")
    scale = arrays["query"].shape[-1] ** -0.5
    for b in range(len(arrays["query"])):
        out, final = oracle.delta_rule(
            golden.recurrent(arrays["initial_state"])[b],
            oracle.unit(arrays["query"][b]) * scale,
            oracle.unit(arrays["key"][b]),
            arrays["value"][b],
            arrays["g"][b],
            arrays["beta"][b],
        )
        close(out, arrays["out"][b], "out")
        close(final, golden.recurrent(arrays["final_state"])[b], "final_state")
    assert not arrays.left


def test_oracle_closed_form_agrees_with_the_recurrence():
    """The tree WY equations, solved densely, give the same outputs and states as node by node."""
    rng = np.random.default_rng(3)
    parents = [-1, 4, 0, 1, 0, 2, 1, 6, 2]  # row 1 hangs below row 4, which comes later
    n, heads, dk, dv = len(parents), 2, 5, 3
    q, k = (oracle.unit(rng.normal(size=(n, 1, dk))) for _ in range(2))
    v, R0 = rng.normal(size=(n, heads, dv)), rng.normal(size=(heads, dv, dk))
    g, beta = -rng.uniform(0.01, 2, (n, heads)), rng.uniform(0, 1, (n, heads))
    outputs, states = oracle.delta_rule_tree(R0, parents, q, k, v, g, beta)
    paths = [oracle.path_to(parents, i) for i in range(n)]
    for h in range(heads):
        G = np.array([sum(g[j, h] for j in path) for path in paths])
        L = np.zeros((n, n))
        for i, path in enumerate(paths):
            for j in path[:-1]:
                L[i, j] = beta[i, h] * np.exp(G[i] - G[j]) * (k[i, 0] @ k[j, 0])
        rhs = beta[:, h, None] * (v[:, h] - np.exp(G)[:, None] * (k[:, 0] @ R0[h].T))
        U = np.linalg.solve(np.eye(n) + L, rhs)
        for i, path in enumerate(paths):
            state = np.exp(G[i]) * R0[h]
            state = state + sum(np.exp(G[i] - G[j]) * np.outer(U[j], k[j, 0]) for j in path)
            np.testing.assert_allclose(states[i, h], state, atol=1e-13)  # float64 rounding
            np.testing.assert_allclose(outputs[i, h], state @ q[i, 0], atol=1e-13)
