"""What JAX compiles while something runs, as JAX itself reports it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

EVENT = "backend_compile_duration"


@contextmanager
def count_compilations() -> Iterator[Counter[str]]:
    """Counts by function, of all threads, until the block ends."""
    seen: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event.endswith(EVENT):
            seen.update([str(details.get("fun_name", "?"))])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
