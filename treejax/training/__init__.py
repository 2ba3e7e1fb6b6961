"""Training a hybrid: corpus, batches, the differentiable rule, the loss and the optimizer.

Reading order: corpus.py (with passages.py, wheels.py), batches.py, rule.py, loss.py, optimizer.py,
settings.py, checkpoints.py; the commands are ``treejax.train`` and ``treejax.evaluate``. The model
is ``treejax.model.forward`` and ``treejax.mtp.head``, the functions that decoding runs: training
only brings its own ``Mixing``. Nothing here is imported by the package's own top level.
"""
