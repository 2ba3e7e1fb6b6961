"""Check the kernels against float64, then time them beside their peers.

    python -m pallas_kernels.bench
    python -m pallas_kernels.bench --batch 1,8 --operations wy_solve,replay --json run.json
    python -m pallas_kernels.bench --batch 1 --layers 2 --value-heads 2 --key-heads 1 --repeats 3

The last one is small enough for a CPU, where the XLA references run. Progress goes to stderr.
"""

import os
import sys
from collections.abc import Sequence

# The peers' framework shares the device's memory; JAX reads this when it first sees the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from pallas_kernels.bench.guard import run_command
from pallas_kernels.bench.run import Run
from pallas_kernels.bench.settings import parse
from pallas_kernels.implementation import resolve


def main(arguments: Sequence[str]) -> int:
    settings = parse(arguments)
    resolve(settings.implementation)  # refuse at once what cannot run here
    return Run(settings).main()


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
