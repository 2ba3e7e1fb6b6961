"""Pallas kernels of the recurrent tree, for Hopper GPUs through Mosaic GPU.

Each operation is a folder: ``__init__.py`` states the contract and picks an implementation,
``reference.py`` is the specification in a few lines of JAX and what runs elsewhere, and
``mosaic_gpu.py`` is the kernel. The package sees arrays only and imports nothing of treejax.
"""
