"""treejax: tree speculative decoding on recurrent-hybrid language models, in JAX."""
