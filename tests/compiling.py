"""What JAX compiles while a test runs something."""

from collections import Counter
from contextlib import contextmanager

import jax


@contextmanager
def compilations():
    """What is compiled meanwhile, as JAX itself reports it: {function: times}."""
    seen: Counter[str] = Counter()

    def listen(event, duration_secs, **details):
        if event.endswith("backend_compile_duration"):
            seen.update([str(details["fun_name"])])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
