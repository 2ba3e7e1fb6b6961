"""Requests: which prompts are served, and as what tokens; FC-10."""

import dataclasses
from typing import Any

import byte_model
import jax.numpy as jnp
import numpy as np
import pytest

from treejax.engine import complete
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
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            complete(model, prompts)
        assert "\n" not in str(caught.value)
    mute = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer: pass token ids"):
        complete(mute, "text")
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        complete(mute, [1, 2], stop=["x"])
    with pytest.raises(ValueError, match="max_tokens is -1"):
        complete(model, "x", max_tokens=-1)
    with pytest.raises(ValueError, match="a stop string is empty"):
        complete(model, "x", stop=[""])
    for stop in list[Any]((258, [1, -1], np.array([300]), [1.0], [True])):
        with pytest.raises(ValueError, match=r"stop holds .* token ids in 0\.\.257") as caught:
            complete(model, "x", stop=stop)
        assert "\n" not in str(caught.value)


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
