"""Pallas kernels of the recurrent tree, for Hopper GPUs through Mosaic GPU.

Each operation is a folder: ``__init__.py`` states the contract and picks an implementation,
``reference.py`` is the specification in a few lines of JAX and what runs elsewhere, and
``mosaic_gpu.py`` is the kernel. The package sees arrays only and imports nothing of treejax.

Reading order:

    implementation   which implementation runs, and what is refused
    tiles, update    register layouts; the arithmetic of one node, shared by all native kernels
    walk             the depth-first program of a tree
    path_scan        a tree's outputs by the native recurrence, one launch a layer
    node_scan        the same, keeping the state of every node
    publish          applying paths to all layers in one launch, shared by the next two
    replay           an accepted path through the native update
    wy_commit        an accepted path from its factors
    wy_solve         a tree's outputs by a triangular solve; ``wy_commit_solve`` commits first
    tree_conv        the convolution over ancestors with activation, heads, norms and gates
    tree_attention   attention to the cached prefix and to ancestors, split over the context
    bench            ``python -m pallas_kernels.bench``: gate, then medians, floors and peers;
                     ``python -m pallas_kernels.bench.attention`` the same for tree_attention

Importing this package imports none of them: ``from pallas_kernels.wy_solve import wy_solve``.
"""
