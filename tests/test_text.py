"""Streaming text: whole characters, stop strings across tokens, and nothing lost or doubled."""

import byte_model
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treejax.text import TextStream


def push_all(stream, tokens):
    """What each token sets free, and at last what was held back."""
    freed = []
    for token in tokens:
        freed.append(stream.push(token))
        if stream.stopped:
            return freed
    return [*freed, stream.flush()]


def tokens_of(text):
    return byte_model.tokenizer().encode(text).ids


def test_a_character_appears_when_its_last_byte_does():
    """Nothing incomplete is shown; each character comes as soon as it is whole."""
    stream = TextStream(byte_model.tokenizer())
    text = "aé€😀b"
    freed = push_all(stream, tokens_of(text))
    assert freed == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_that_never_become_a_character_are_shown_as_such():
    """A broken character before text, and one at the very end."""
    lead, rest = tokens_of("é")
    assert "".join(push_all(TextStream(byte_model.tokenizer()), [lead, *tokens_of("x")])) == "�x"
    assert push_all(TextStream(byte_model.tokenizer()), [lead]) == ["", "�"]
    assert "".join(push_all(TextStream(byte_model.tokenizer()), [rest, lead, rest])) == "�é"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_all_pieces_together_are_the_decoded_text(tokens):
    """Whatever the bytes: the concatenation is what decoding at once gives."""
    stream = TextStream(byte_model.tokenizer())
    assert "".join(push_all(stream, tokens)) == byte_model.tokenizer().decode(tokens)


@given(st.text("abé€", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    """Streamed text equals the whole text cut at the stop that is complete first."""
    stream = TextStream(byte_model.tokenizer(), stops)
    shown = "".join(push_all(stream, tokens_of(text)))
    prefixes = (text[:end] for end in range(len(text) + 1))
    stopped = next((p for p in prefixes if any(stop in p for stop in stops)), None)
    if stopped is None:
        assert shown == text and not stream.stopped
    else:
        assert stream.stopped
        assert shown == stopped[: min(stopped.find(s) for s in stops if s in stopped)]


def test_only_what_may_begin_a_stop_is_held_back():
    stream = TextStream(byte_model.tokenizer(), ["\n\nclass", "aab"])
    freed = [stream.push(token) for token in tokens_of("x\n\ndef aaab")]
    assert freed == ["x", "", "", "\n\nd", "e", "f", " ", "", "", "a", ""]
    assert stream.stopped and stream.flush() == ""
    assert stream.push(tokens_of("z")[0]) == ""


def test_a_decoder_that_strips_a_leading_space_keeps_those_between_words():
    """Each token is decoded behind the last whole one, as in a text."""
    words = {"▁hello": 0, "▁wor": 1, "ld": 2, "<s>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    assert push_all(TextStream(tokenizer), [0, 3, 1, 2]) == ["hello", "", " wor", "ld", ""]


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_without_a_tokenizer_there_is_no_text(stops):
    stream = TextStream(None, stops)
    assert push_all(stream, [1, 2, 3]) == ["", "", "", ""] and not stream.stopped
