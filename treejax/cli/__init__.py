"""What the commands share: guarding, options, printing, the compilation cache.

Only the command modules (those that run with ``python -m``) import from here.
"""
