"""Requests: which prompts are served, and as what tokens; FC-10."""

import dataclasses
from typing import Any

import byte_model
import jax.numpy as jnp
import numpy as np
import pytest

import treejax
from treejax.drafters import MTP
from treejax.engine import complete, stream
from treejax.policies import WY
from treejax.requests import make_requests
from treejax.state import init_state
from treejax.steps.verify import verify
from treejax.tree import Tree


def test_fc10_prompts_that_cannot_be_served_are_refused_in_one_line():
    """FC-10: an empty prompt, a token outside the vocabulary, text without a tokenizer."""
    model = byte_model.model()
    for prompts, message in [
        ("", "prompt 0 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([1, 258], "holds token 258, expected 0..257"),
        ([], "no prompt was given"),
        (5, "prompts are of type int, expected a string, a list of token ids, or a list of eith"),
        (None, "prompts are of type NoneType"),
        (b"text", "prompts are of type bytes"),
        ({"prompt": "x"}, "prompts are of type dict"),
        ([1.5, 2.0], r"prompt 0 is \[1\.5, 2\.0\], expected text or a list of token ids"),
        ([[1], [None]], r"prompt 1 is \[None\], expected"),
        (["x", 5], "prompt 1 is 5, expected text or a list"),
        (["x", b"y"], "prompt 1 is b'y', expected text or a list"),
        ([[[1, 2], [3]]], "prompt 0 is an array of shape"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            complete(model, prompts)
        assert "\n" not in str(caught.value)
    mute = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer: pass token ids"):
        complete(mute, "text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        complete(mute, [1, 2], stop=["x"])
    for count in list[Any]((-1, 2.5, "8", None, True)):
        with pytest.raises(ValueError, match="max_tokens is .* expected an integer of 0 or more"):
            complete(model, "x", max_tokens=count)
    with pytest.raises(ValueError, match="a stop string is empty"):
        complete(model, "x", stop=[""])
    for stop in list[Any]((258, [1, -1], np.array([300]), [1.0], [True])):
        with pytest.raises(ValueError, match=r"stop holds .* token ids in 0\.\.257") as caught:
            complete(model, "x", stop=stop)
        assert "\n" not in str(caught.value)


def test_what_is_no_argument_is_named_before_anything_runs():
    """From Python too: one line at the call, of a stream as well."""
    model = byte_model.model()
    for how, message in list[Any](
        (
            ({"stop": 2.5}, "stop is 2.5, expected strings or token ids, several or one"),
            ({"stop": b"x"}, "stop is b'x', expected strings"),
            ({"stop": {5: "x", "": 1}}, "a stop string is empty"),
            ({"seed": 2.5}, "seed is 2.5, expected an integer in"),
            ({"seed": None}, "seed is None, expected an integer in"),
            ({"sampling": 0.8}, r"sampling is 0.8, expected settings: treejax.Sampling\("),
            ({"drafter": "nope"}, "drafter 'nope' is unknown"),
            ({"tree": 5}, "tree is 5, expected a name such as 'chain5'"),
            ({"rule": ["match"]}, r"rule \['match'\] is unknown"),
            ({"drafter": 5}, "int is no drafter: it lacks name"),
            ({"drafter": MTP}, r"MTP \(a class\) is no drafter"),
            ({"policy": WY}, r"WY \(a class\) is no policy"),
            ({"policy": object()}, "object is no policy: it lacks name"),
            ({"steps_per_visit": 0}, "steps_per_visit is 0"),
            ({"rule": "nope"}, "rule 'nope' is unknown"),
        )
    ):
        for call in (complete, stream):  # nothing is asked of the stream: it is refused as made
            with pytest.raises(ValueError, match=message) as caught:
                call(model, "x", **how)
            assert "\n" not in str(caught.value)
    for call in list[Any]((complete, stream, treejax.score)):
        with pytest.raises(ValueError, match=r"expected a loaded one: load_model\('small'\)"):
            call("small", "x")
        with pytest.raises(ValueError, match="model is of type NoneType, expected a treejax.Model"):
            call(None, "x")
    with pytest.raises(ValueError, match="model is the name 'small'"):
        treejax.prefill("small", init_state(model.config, 1, 64), [[1]], [1])
    with pytest.raises(ValueError, match="prompt 0 is 5, expected text or a list of token ids"):
        stream(model, 5)


def test_no_stop_and_stops_that_are_read_once():
    (served,) = make_requests(byte_model.model(eos=(11,)), ["a"], np.int64(1), None)
    assert served.stop_ids == {11} and not served.watched
    stops: Any = (stop for stop in ("x", 7))
    (served,) = make_requests(byte_model.model(), ["a"], 1, stops)
    assert served.watched and 7 in served.stop_ids


def test_stop_tokens_may_be_numpys():
    """An id from an array ends a text as a plain number does."""
    model = byte_model.model()
    for stop in list[Any]((np.int32(7), np.array([7]), [7], 7)):
        (served,) = make_requests(model, ["a"], 1, stop)
        assert served.stop_ids == {7, *model.config.eos_token_ids}


def test_fc10_no_hidden_tokens_are_added_to_a_prompt():
    """FC-10: the request holds the prompt's own tokens and nothing else."""
    (served,) = make_requests(byte_model.model(), ["ab"], 1, ())
    assert served.prompt == byte_model.tokenizer().encode("ab").ids and len(served.prompt) == 2
    (served,) = make_requests(byte_model.model(), [jnp.array([3, 4])], 1, ())
    assert served.prompt == [3, 4]


def test_a_tree_token_outside_the_vocabulary_is_refused():
    """JAX would clip it to the last row of the embedding and verify another token."""
    model = byte_model.model()
    state = init_state(model.config, 1, 64)
    tree = Tree.from_parents([1, 300], [-1, 0])
    with pytest.raises(ValueError, match=r"holds token 300, expected 0\.\.257"):
        verify(model, state, tree)


def test_an_array_of_prompts_is_a_list_of_prompts():
    """Rows of an array are prompts of one length."""
    both = complete(byte_model.model(), jnp.array([[5, 7], [5, 9]]), max_tokens=0)
    assert [made.tokens for made in both] == [(), ()]
