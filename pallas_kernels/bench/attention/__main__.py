"""Check tree attention against float32, then time it beside XLA's attention and cuDNN's.

    python -m pallas_kernels.bench.attention
    python -m pallas_kernels.bench.attention --context 131072 --rows 28 --batch 1 --json run.json
    python -m pallas_kernels.bench.attention --context 64 --rows 6 --batch 1 --repeats 3 \
        --heads 4 --key-heads 2 --width 64 --layers 2

The last one is small enough for a CPU, where the XLA reference runs. Progress goes to stderr.
"""

import sys
from collections.abc import Sequence

from pallas_kernels.bench.attention.run import Run
from pallas_kernels.bench.attention.settings import parse
from pallas_kernels.bench.guard import run_command
from pallas_kernels.implementation import resolve


def main(arguments: Sequence[str]) -> int:
    settings = parse(arguments)
    resolve(settings.implementation)  # refuse at once what cannot run here
    return Run(settings).main()


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
