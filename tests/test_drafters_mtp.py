"""The MTP head against golden numbers."""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from treejax import layers
from treejax.checkpoint import load_model
from treejax.drafters import MTP, make_drafter
from treejax.model import Model
from treejax.mtp import mtp_forward

# The tolerance is ten times what another order of summation moves, far above such roundings.
pytestmark = pytest.mark.compiles_fast

forward = jax.jit(mtp_forward, static_argnames="config")
scores = jax.jit(layers.logits)


@functools.cache
def golden_model(preset):
    return load_model(golden.checkpoint(preset))


@functools.cache
def golden_pairs(preset):
    """All pairs of the golden run, prompt and chained drafts: hidden [1, T, H], tokens [1, T]."""
    arrays = golden.arrays(preset, "mtp")
    chained = [arrays["hidden"][-1:], arrays["chain_hidden"][:-1]]
    hidden = np.concatenate([arrays["main_hidden"], *chained])
    following = [arrays["ids"][1:], arrays["next_token"][None], arrays["draft_tokens"][:-1]]
    following = np.concatenate(following).astype(np.int32)
    return jnp.asarray(hidden)[None], jnp.asarray(following)[None]


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_fc21_head_equals_golden(preset):
    """FC-21: embedding half first, post-norm hidden, rotary position t; then chained on h'."""
    model, arrays = golden_model(preset), golden.arrays(preset, "mtp")
    out, (keys, values) = forward(model.config, model.params, *golden_pairs(preset))
    logits, count = scores(model.params, out), len(arrays["ids"])
    pairs = {
        "hidden": out[0, :count],
        "logits": logits[0, :count],
        "chain_hidden": out[0, count:],
        "chain_logits": logits[0, count:],
        "key": np.swapaxes(keys[0, :count], 0, 1),
        "value": np.swapaxes(values[0, :count], 0, 1),
    }
    for name, got in pairs.items():
        np.testing.assert_allclose(got, arrays[name], atol=golden.TOLERANCE, rtol=0, err_msg=name)


@pytest.mark.parametrize("preset", golden.PRESETS)
def test_fc21_drafter_equals_golden(preset):
    """FC-21: prime and propose give the golden drafts, runners-up and cache.

    So many runners-up that their order gives away any change of the logits.
    """
    model, arrays = golden_model(preset), golden.arrays(preset, "mtp")
    ids, steps, width = arrays["ids"], len(arrays["draft_tokens"]), 60
    drafter = MTP(f"caterpillar{steps}x{width}")
    draft = drafter.init(model, 1, 32)
    draft = jax.jit(drafter.prime)(
        draft,
        jnp.asarray(arrays["main_hidden"])[None],
        jnp.asarray(ids)[None],
        jnp.array([len(ids)], jnp.int32),
    )
    pending = jnp.asarray(arrays["next_token"])[None]
    tree, q, draft = jax.jit(drafter.propose)(draft, None, pending, None)

    assert q is None and int(tree.size[0]) == 1 + steps * width
    tokens, shape = np.asarray(tree.tokens[0]), drafter.static_shape
    golden_logits = np.concatenate([arrays["logits"][-1:], arrays["chain_logits"]])
    node = 0
    for step in range(steps):
        below = list(shape.children(node))
        assert tokens[below[0]] == arrays["draft_tokens"][step]
        best = np.sort(golden_logits[step])[::-1][:width]
        # twice the tolerance: two logits may swap ranks when each is off by one
        limit = 2 * golden.TOLERANCE
        np.testing.assert_allclose(golden_logits[step][tokens[below]], best, atol=limit, rtol=0)
        node = below[0]
    for name, cache in (("key", draft.memory.keys), ("value", draft.memory.values)):
        got = np.swapaxes(cache[0, : len(ids)], 0, 1)
        np.testing.assert_allclose(got, arrays[name], atol=golden.TOLERANCE, rtol=0, err_msg=name)


@pytest.mark.parametrize("preset", golden.PRESETS)
@pytest.mark.parametrize("mistake", ["pre-norm hidden", "hidden first", "shifted hidden"])
def test_fc21_wrong_inputs_move_the_logits(preset, mistake):
    """FC-21: the golden comparison would notice each known way to feed the head wrongly."""
    model, arrays = golden_model(preset), golden.arrays(preset, "mtp")
    (hidden, following), params = golden_pairs(preset), dict(model.params)
    if mistake == "pre-norm hidden":  # up to a scale that the head's own norm removes
        hidden = hidden / (1.0 + params["norm"])[None, None, :]
    elif mistake == "hidden first":
        halves = jnp.split(params["mtp"]["fc"], 2)
        params["mtp"] = params["mtp"] | {"fc": jnp.concatenate(halves[::-1])}
    else:
        hidden = jnp.roll(hidden, 1, axis=1)
    out, _ = forward(model.config, params, hidden, following)
    expected = np.concatenate([arrays["logits"], arrays["chain_logits"]])
    moved = np.abs(scores(params, out)[0] - expected).max()
    assert moved > 100 * golden.TOLERANCE


@pytest.mark.parametrize("preset", ["qwen3_5_wrapped"])
def test_bfloat16_head_gives_the_golden_drafts(preset):
    """Every dtype meets its own; the drafts are those of float32, 0.19 ahead of the second best."""
    model, arrays = load_model(golden.checkpoint(preset), "bfloat16"), golden.arrays(preset, "mtp")
    drafter, count = MTP(f"chain{len(arrays['draft_tokens'])}"), len(arrays["ids"])
    draft = drafter.init(model, 1, 32)
    prompt = jnp.asarray(arrays["main_hidden"], jnp.bfloat16), jnp.asarray(arrays["ids"])
    lengths = jnp.array([count], jnp.int32)
    draft = jax.jit(drafter.prime)(draft, *(a[None] for a in prompt), lengths)
    pending = jnp.asarray(arrays["next_token"])[None]
    tree, _, draft = jax.jit(drafter.propose)(draft, None, pending, None)
    assert draft.memory.keys.dtype == draft.memory.waiting.dtype == jnp.bfloat16
    np.testing.assert_array_equal(tree.tokens[0, 1:], arrays["draft_tokens"])


@pytest.mark.parametrize("name", ["mtp", "mtp+suffix"])
def test_fc20_no_head_no_mtp_drafter(name):
    """FC-20: a model that loads without ``mtp.*`` tensors refuses the drafter before generating."""
    params = {key: value for key, value in tiny.model().params.items() if key != "mtp"}
    with pytest.raises(ValueError, match=r"needs an MTP head, .* no mtp\.\* tensors") as caught:
        make_drafter(name).init(Model(params, tiny.CONFIG), 1, 16)
    assert "\n" not in str(caught.value)
    assert make_drafter("suffix").init(Model(params, tiny.CONFIG), 1, 16)
