"""``treejax.score``: of texts, of tokens, and what it refuses."""

import dataclasses
from types import SimpleNamespace

import byte_model
import jax.numpy as jnp
import numpy as np
import pytest

import treejax
from treejax import scoring

TEXTS = ["def f(x):\n", "x", "import \u00e9"]  # a byte is a token


def test_texts_are_scored_as_their_tokens_are(monkeypatch):
    """In a batch with others and alone, where nothing is run twice: the tokens are the same."""
    model, ids = byte_model.model(), [byte_model.tokenizer().encode(text).ids for text in TEXTS]
    lengths = np.array([len(row) for row in ids])
    tokens = np.zeros((len(ids), lengths.max()), np.int32)
    for row, mine in zip(tokens, ids, strict=True):
        row[: len(mine)] = mine
    made = np.asarray(treejax.score(model, TEXTS))
    np.testing.assert_array_equal(made, treejax.score(model, tokens, lengths))
    inside = np.arange(1, lengths.max())[None, :] < lengths[:, None]
    assert made.shape == inside.shape
    assert (made[inside] < 0).all() and not made[~inside].any()
    given = []

    def note(model, state, tokens, lengths, hidden):
        given.append((tokens.tolist(), lengths.tolist()))
        return SimpleNamespace(hidden=jnp.zeros((1, 1, 1))), state

    monkeypatch.setattr(scoring, "prefill", note)
    monkeypatch.setattr(scoring, "_score", lambda *_: jnp.zeros(1))
    treejax.score(model, TEXTS[0])
    assert given == [([ids[0]], [len(ids[0])])]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ("text", [4], "lengths were given with texts, which have their own: leave them out"),
        (["text", ""], None, "text 1 is empty, expected at least one token"),
        (["text", 7], None, "a text is int, expected texts alone, or token ids"),
        ([[1, 2]], None, "lengths are missing, expected"),
        ([1, 2], [2], r"tokens have shape \(2,\), expected \[B, T\], or a text"),
        ([[1, 300]], [2], "tokens must lie in 0..257, got 300"),
        ([], None, "there is nothing to score, expected at least one text"),
        ((), [], "there is nothing to score"),
        ([[]], [0], "there is nothing to score"),
        (np.zeros((0, 3), np.int32), [], "there is nothing to score"),
        (5, None, r"tokens have shape \(\), expected \[B, T\], or a text"),
        ([[1, 2], [3]], [2, 1], "tokens are rows of different lengths, expected"),
        ([[1.5, 2.0]], [2], "tokens are of type float64, expected integers"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_one_line(tokens, lengths, message):
    with pytest.raises(ValueError, match=message) as refused:
        treejax.score(byte_model.model(), tokens, lengths)
    assert "\n" not in str(refused.value)


def test_what_is_no_model_is_named():
    with pytest.raises(ValueError, match=r"the name 'small', expected .*: load_model\('small'\)"):
        treejax.score("small", "text")


def test_a_model_without_a_tokenizer_says_what_to_do():
    model = dataclasses.replace(byte_model.model(), tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer: pass token ids"):
        treejax.score(model, "text")
