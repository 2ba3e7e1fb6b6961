"""The legend of axis letters, and the decorator that checks them.

B batch              T tokens of one block      N tree capacity (node rows)
S cache rows         V vocabulary               H hidden size
L layers             Lg recurrent layers        La attention layers
Hk key heads of a recurrent layer               Hv its value heads (Hk divides Hv)
dk key width         dv value width             K convolution width
C convolution channels, 2 * Hk * dk + Hv * dv
Hq attention query heads                        Hkv attention key/value heads
D attention head width                          P paths of a tree

A recurrent state is R[Hv, dv, dk]: rows are value components, columns key components.

Set the environment variable TREEJAX_TYPECHECK=beartype before the import to have every
``typed`` function check its shapes and dtypes while it is traced; the tests do.
"""

import importlib
import os

from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key, Shaped, jaxtyped

__all__ = ["Array", "Bool", "Float", "Float32", "Int", "Int32", "Key", "Shaped", "typed"]

_CHECKER_MODULE = os.environ.get("TREEJAX_TYPECHECK")


def typed(function):
    """Check the shape annotations of ``function`` at each trace, when a checker is chosen."""
    if _CHECKER_MODULE is None:
        return function
    checker = getattr(importlib.import_module(_CHECKER_MODULE), _CHECKER_MODULE)
    return jaxtyped(typechecker=checker)(function)
