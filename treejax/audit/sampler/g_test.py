"""Likelihood-ratio tests of counts against exact probabilities, in float64 NumPy.

G = 2 sum observed log(observed / expected) is close to chi-square with one degree of freedom less
than there are cells (Sokal and Rohlf, Biometry, section 17.2); cells of few expected counts are
pooled, and Williams' correction takes out what is left of the bias in the tail.
"""

import math

import numpy as np

LEAST = 20.0
"""Expected counts that a cell must have to stand alone."""


def g_test(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int, float]:
    """(G, degrees of freedom, p-value) of counts [K] against probabilities [K].

    A count where the probability is 0 cannot be chance: p is 0. One cell alone tells nothing: p 1.

    Raises:
      ValueError: the probabilities do not sum to 1.
    """
    if abs(expected.sum() - 1) > 1e-9:
        raise ValueError(f"expected probabilities sum to {expected.sum()}, expected 1")
    if observed[expected == 0].any():
        return math.inf, 0, 0.0
    total = float(observed.sum())
    counts, observed = expected * total, observed.astype(np.float64)
    rare = counts < LEAST
    cells, seen = counts[~rare], observed[~rare]
    if rare.any() and counts[rare].sum() > 0:
        cells = np.append(cells, counts[rare].sum())
        seen = np.append(seen, observed[rare].sum())
        if cells[-1] < LEAST and len(cells) > 1:  # still too few: they join the rarest cell
            least = int(np.argmin(cells[:-1]))
            cells[least] += cells[-1]
            seen[least] += seen[-1]
            cells, seen = cells[:-1], seen[:-1]
    freedom = len(cells) - 1
    if freedom < 1:
        return 0.0, 0, 1.0
    some = seen > 0
    g = 2 * float((seen[some] * np.log(seen[some] / cells[some])).sum())
    williams = 1 + (float((total / cells).sum()) - 1) / (6 * total * freedom)
    g = max(g, 0.0) / williams
    return g, freedom, survival(g, freedom)


def survival(x: float, freedom: int) -> float:
    """P(chi-square of so many degrees of freedom > x).

    The regularised upper incomplete gamma function Q(freedom / 2, x / 2): by its series below the
    mean and by Lentz's continued fraction above it (Numerical Recipes, section 6.2).
    """
    a, x = freedom / 2, x / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a)) if x < 1e4 + 2 * a else 0.0
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1.0 - total * scale)
    b = x + 1 - a
    c, d = math.inf, 1 / b
    fraction, i = d, 0
    while True:
        i += 1
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        fraction *= d * c
        if abs(d * c - 1) < 1e-15 or i > 100_000:
            return scale * fraction
