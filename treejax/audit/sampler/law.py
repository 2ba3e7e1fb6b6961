"""The law of the next token in float64 NumPy, written from the definitions of the settings.

An oracle: nothing of the package's own processing is called. Sets come from comparing all pairs of
tokens, not by bisection, and ties are kept by value. Each law has its margin: how near a value lies
to the nearest cut that could fall on its other side in float32.
"""

import numpy as np

from treejax.sampling import Sampling


def laws(
    logits: np.ndarray, counts: np.ndarray, prompt: np.ndarray, sampling: Sampling
) -> tuple[np.ndarray, float]:
    """(p [P, V], the smallest margin) of the token that follows each of P contexts.

    Stages as ``Sampling`` lists them: bias, bans, end tokens; repetition, frequency and presence
    penalty; temperature; min-p; top-k; top-p on the survivors, renormalised.

    Args:
      logits: [P, V] of the row that each context ends in.
      counts: [P, V] how often each token was put out, those on the tree's path included.
      prompt: [V] which tokens the prompt holds.
      sampling: one number a setting, as a user writes them, not prepared; a temperature above 0.
    """
    s, size = sampling, logits.shape[1]
    x = _adjusted(logits.astype(np.float64), counts, prompt, sampling)
    w = np.exp((x - x.max(axis=1, keepdims=True)) / float(s.temperature))
    margin, keep = 1.0, w > 0
    if s.min_p is not None:
        keep &= w >= s.min_p
        margin = min(margin, float(np.abs(w[w > 0] - s.min_p).min()))
    if s.top_k is not None:
        least = np.sort(x, axis=1)[:, ::-1][:, min(s.top_k, size) - 1][:, None]
        inside = x >= least
        if s.exact_top_k:  # the lowest ids first among those that are equal
            order = np.argsort(-x, axis=1, kind="stable")
            inside = np.argsort(order, axis=1) < s.top_k
        keep &= inside
        with np.errstate(invalid="ignore"):
            near = np.abs(x - least)
        near = near[np.isfinite(near) & (x != least)]
        margin = min(margin, float(near.min(initial=1.0)))
    p = np.where(keep, w, 0.0)
    p /= p.sum(axis=1, keepdims=True)
    if s.top_p is not None and s.top_p < 1:
        above = np.einsum("pj,pij->pi", p, x[:, None, :] > x[:, :, None])
        margin = min(margin, float(np.abs(above - s.top_p)[p > 0].min()))
        p = np.where(above < s.top_p, p, 0.0)
        p /= p.sum(axis=1, keepdims=True)
    return p, margin


def _adjusted(
    x: np.ndarray, counts: np.ndarray, prompt: np.ndarray, sampling: Sampling
) -> np.ndarray:
    """[P, V] logits after bias, bans, end tokens and penalties."""
    s, tokens = sampling, np.arange(x.shape[1])
    for token, bias in (s.logit_bias or {}).items():
        x[:, token] += bias
    banned = np.isin(tokens, list(s.banned_tokens or ()))
    if s.allowed_tokens is not None:
        banned |= ~np.isin(tokens, list(s.allowed_tokens))
    x[:, banned] = -np.inf
    if s.min_tokens is not None:
        short = counts.sum(axis=1) < s.min_tokens
        x[np.ix_(short, np.isin(tokens, list(s.end_tokens)))] = -np.inf
    if s.repetition_penalty is not None:
        seen = (counts > 0) | prompt[None, :]
        r = s.repetition_penalty
        x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    if s.frequency_penalty is not None:
        x = x - s.frequency_penalty * counts
    if s.presence_penalty is not None:
        x = x - s.presence_penalty * (counts > 0)
    return x
