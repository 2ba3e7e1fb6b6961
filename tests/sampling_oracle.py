"""The law of one row in float64 NumPy: masks, penalties and filters written from their definitions.

Nothing of the package is imported. Contexts are plain lists of tokens, sets are built by sorting,
and every law comes with its margin: how near a value lies to the nearest cut. Nearer than a few
float32 roundings, float32 may fall on either side.
"""

import numpy as np

SETTINGS = {
    "temperature": 1.0,
    "min_p": 0.0,
    "top_k": None,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "allowed_tokens": None,
    "banned_tokens": (),
    "min_tokens": 0,
    "end_tokens": (),
    "exact_top_k": False,
}


def adjusted(logits, prompt=(), output=(), **settings):
    """Logits after bias, bans and penalties; ``output`` ends with the row's own path."""
    s = SETTINGS | settings
    x = [float(np.float32(value)) for value in logits]
    prompt, output = list(prompt), list(output)
    for token in range(len(x)):
        x[token] += float(s["logit_bias"].get(token, 0.0))
        banned = token in s["banned_tokens"]
        banned |= s["allowed_tokens"] is not None and token not in s["allowed_tokens"]
        banned |= token in s["end_tokens"] and len(output) < s["min_tokens"]
        if banned:
            x[token] = -np.inf
            continue
        if token in prompt or token in output:
            r = float(s["repetition_penalty"])
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= float(s["frequency_penalty"]) * output.count(token)
        x[token] -= float(s["presence_penalty"]) * (1 if output.count(token) > 0 else 0)
    return np.array(x)


def law(logits, prompt=(), output=(), **settings):
    """(probabilities [V], margin) of the token that follows ``prompt`` and ``output``."""
    s = SETTINGS | settings
    x = adjusted(logits, prompt, output, **settings)
    down = sorted(range(len(x)), key=lambda token: (-x[token], token))  # lowest ids first in ties
    if s["temperature"] == 0:
        return np.eye(len(x))[down[0]], _gap(x, x[down[0]])
    p = np.exp((x - x.max()) / s["temperature"])
    p /= p.sum()
    margin = 1.0
    keep = p >= s["min_p"] * p.max()
    if s["min_p"] > 0:
        margin = np.abs(p / p.max() - s["min_p"]).min()
    if s["top_k"] is not None:
        k = min(s["top_k"], len(x))
        least = x[down[k - 1]]
        margin = min(margin, _gap(x, least))
        chosen = down[:k] if s["exact_top_k"] else np.flatnonzero(x >= least)
        keep &= np.isin(np.arange(len(x)), chosen)
    p = np.where(keep, p, 0.0) / p[keep].sum()
    if s["top_p"] < 1:
        mass, kept, levels = 0.0, np.zeros(len(x), bool), sorted(set(x[keep]), reverse=True)
        for level in levels:
            margin = min(margin, abs(mass - s["top_p"]))
            if mass >= s["top_p"]:
                break
            margin = min(margin, _gap(x, level))
            kept |= keep & (x == level)
            mass += p[keep & (x == level)].sum()
        p = np.where(kept, p, 0.0) / p[kept].sum()
    return p, margin


def _gap(x, value):
    """Distance from ``value`` to the nearest other finite value."""
    others = np.abs(x[np.isfinite(x) & (x != value)] - value)
    return others.min() if others.size and np.isfinite(value) else 1.0


def random_settings(rng, vocabulary, exact=None):
    """Every option at once, each neutral now and then; numbers that float32 holds exactly.

    At least one token is never banned and is no end token, so that a row always has one to draw.
    """
    tokens = rng.permutation(vocabulary)
    cut = int(rng.integers(0, vocabulary // 2))
    some = [[], tokens[: vocabulary // 4].tolist()][int(rng.integers(2))]
    return {
        "temperature": float(rng.choice([0.0, 0.5, 1.0, 1.5])),
        "min_p": float(rng.choice([0.0, 0.03125, 0.125])),
        "top_k": int(rng.integers(1, vocabulary + 4)),
        "top_p": float(rng.choice([1.0, 0.96875, 0.75])),
        "repetition_penalty": float(rng.choice([1.0, 0.75, 1.25, 2.0])),
        "presence_penalty": float(rng.choice([0.0, -0.5, 0.75])),
        "frequency_penalty": float(rng.choice([0.0, 0.5, -0.25])),
        "logit_bias": {
            int(token): float(rng.choice([-np.inf, -100.0, -1.5, 0.0, 2.25]))
            for token in rng.choice(tokens[:-1], size=min(4, vocabulary - 1), replace=False)
        },
        "allowed_tokens": [None, tokens[cut:].tolist()][int(rng.integers(2))],
        "banned_tokens": some,
        "min_tokens": int(rng.integers(0, 9)),
        "end_tokens": tokens[vocabulary // 3 : vocabulary // 3 + 3].tolist(),
        "exact_top_k": bool(rng.integers(2)) if exact is None else exact,
    }
