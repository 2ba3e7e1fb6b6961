"""The three steps of one decoding iteration, each jitted alone and together in the engine.

``verify`` runs the target over a whole tree, ``select`` decides which path is emitted, ``publish``
makes the state of exactly that path durable.
"""
