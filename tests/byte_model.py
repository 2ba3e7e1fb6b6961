"""The smallest hybrid again, with a byte tokenizer: text in, text out, for the loop and commands.

Its random weights are scaled so that greedy text wanders through the bytes and does not loop.
"""

import dataclasses
import functools

import jax
import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treejax import parameters
from treejax.model import Model

VOCABULARY = 258  # 256 bytes, and two ids that no text has


@functools.cache
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


@functools.cache
def model(context=2048, mtp=True, eos=()):
    config = dataclasses.replace(
        tiny.CONFIG,
        vocab_size=VOCABULARY,
        max_position_embeddings=context,
        mtp_num_hidden_layers=int(mtp),
        eos_token_ids=eos,
    )
    params = parameters.init(config, jax.random.key(0))
    params["embed"] = 20.0 * params["embed"]
    params["lm_head"] = 50.0 * params["lm_head"]
    return Model(params, config, tokenizer())
