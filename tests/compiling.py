"""What JAX compiles while a test runs something, by the name that the tests know it under."""

from treejax.ablation.compilations import count_compilations as compilations

__all__ = ["compilations"]
