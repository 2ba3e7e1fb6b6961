"""Continue a prompt: text to stdout as it comes, statistics to stderr.

    python -m treejax.generate --prompt "def main():" --max-tokens 200

Without ``--checkpoint`` the small trained model that ships with the package writes. ``--check``
decodes plainly too and compares. ``--help`` lists all options.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TextIO

import jax

from treejax import agreement
from treejax.checkpoint import SHIPPED, load_model
from treejax.cli import printing
from treejax.cli.cache import use_compilation_cache
from treejax.cli.generate_options import Options, read_options
from treejax.cli.guard import INTERRUPTED, run_command, say
from treejax.cli.kernels import Chosen, choose_implementation, describe_implementations
from treejax.drafters import REGISTRY as DRAFTERS
from treejax.drafters import Drafter
from treejax.drafters.topologies import FORMS, NAMED
from treejax.families import REGISTRY as FAMILIES
from treejax.loop import choose_drafter, run
from treejax.model import Model
from treejax.policies import REGISTRY as POLICIES
from treejax.policies.choose import choose_policy
from treejax.requests import Request, make_requests
from treejax.state import State
from treejax.steps.rules import REGISTRY as RULES

NAME = "treejax.generate"
LARGE_TREE = 64
"""Rows of a tree above which what is compiled is announced wherever stderr goes: a chain of 128
takes a minute on two cores, one of 500 several."""


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments)
    use_compilation_cache()
    if options is None:
        list_choices()
        return 0
    printing.utf8_output()
    with ExitStack() as files:
        report = None
        if options.stats_file is not None:  # opened first: a wrong path costs no generation
            report = files.enter_context(options.stats_file.open("w", encoding="utf-8"))
        model = load_model(options.checkpoint, options.dtype, fused=True)
        if options.drafter == "auto" and "mtp" not in model.params:
            say(NAME, "this model has no MTP head, so 'suffix' drafts")
        drafter = choose_drafter(model, options.drafter, options.tree)
        kernels = choose_implementation(options.implementation, model.config, drafter.capacity)
        policy, why = options.policy, None
        if policy == "auto":
            policy, why = choose_policy(model.config, 1, drafter.capacity, kernels.implementation)
        (request,) = make_requests(model, [options.prompt], options.max_tokens, options.stop)
        try:
            state = generate(model, request, drafter, policy, options, kernels)
        except BrokenPipeError:  # nobody reads the text any more, but the file was asked for
            write_figures(report, request, None)
            raise
        check = None
        if options.check and state is not None:
            check = compare_with_plain(model, request, state, options)
        write_figures(report, request, check)
        if options.stats == "json":
            write_figures(sys.stderr, request, check)
        elif options.stats == "text" and not options.max_tokens:
            say(NAME, "nothing was generated: --max-tokens is 0, expected 1 or more for a text")
        elif options.stats == "text":
            count = len(request.prompt)
            text = printing.stats_text(
                request.stats, count, drafter, options.dtype, check, kernels.notice, why
            )
            sys.stderr.write(text)
    if request.stats.finish_reason == "interrupted":
        return INTERRUPTED
    return 0 if check is None or check.ok else 1


def generate(
    model: Model,
    request: Request,
    drafter: Drafter,
    policy: str,
    options: Options,
    kernels: Chosen,
) -> State | None:
    """Serve the request and print its text: the final state, None if interrupted or no step."""
    how = (policy, drafter, None, options.sampling, options.seed)
    steps = run(
        *(model, [request], *how),
        warm_up=True,
        implementation=kernels.implementation,
        rule=options.rule,
        steps_per_visit=options.steps_per_visit,
    )
    printer = printing.TextPrinter(sys.stdout)
    if options.idle_seed:  # no mistake: scripts pass a seed always
        say(NAME, "--seed has no effect at temperature 0 (greedy): add --temperature for another")
    rows = drafter.capacity
    if rows > LARGE_TREE and options.max_tokens:
        tree = f"a tree of {rows} rows ({drafter.shape.name})"
        say(NAME, f"compiling, unless it is in the cache, for {tree}: this may take minutes")
    elif sys.stderr.isatty():  # the first run of new shapes is silent for a while
        say(NAME, "compiling what is not in the cache yet")
    with ExitStack() as tracing:
        try:
            while True:
                (piece,) = next(steps)
                printer.show(piece)
                if options.profile is not None and not request.stats.steps:
                    tracing.enter_context(jax.profiler.trace(str(options.profile)))
        except StopIteration as stop:
            return stop.value
        except KeyboardInterrupt:
            return None
        finally:
            printer.close()


def compare_with_plain(
    model: Model, request: Request, state: State, options: Options
) -> agreement.Agreement | None:
    """Plain decoding of as many tokens as the state holds; None if interrupted."""
    prompt = request.prompt
    common: dict[str, Any] = {"sampling": options.sampling, "seed": options.seed}
    same = {"policy": request.stats.policy, "implementation": request.stats.implementation}
    budget = int(state.length[0]) - len(prompt) + 1
    try:
        (plain,) = agreement.record(model, [prompt], budget, **same, **common)
        drafted = agreement.Recording(tuple(request.tokens), request.stats, state)
        return agreement.compare(model, prompt, drafted, plain, **common)
    except KeyboardInterrupt:
        request.stats.finish_reason = "interrupted"
        return None


def write_figures(file: TextIO | None, request: Request, check: agreement.Agreement | None) -> None:
    """The statistics as one line of JSON, with the outcome of the check if there was one."""
    if file is not None:
        checked = {} if check is None else {"check": check.as_dict()}
        file.write(json.dumps(request.stats.as_dict() | checked) + "\n")


def list_choices() -> None:
    """What the options accept, on stdout."""
    devices = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
    rows = {
        "policies": f"auto, {', '.join(POLICIES)}",
        "drafters": ", ".join(name for name in DRAFTERS if name != "scripted")
        + "; scripted (from Python only: it needs the answers)",
        "trees": f"{', '.join(NAMED)}, {FORMS}",
        "rules": ", ".join(
            name if rule.lossless else f"{name} (lossy)" for name, rule in RULES.items()
        ),
        "families": ", ".join(FAMILIES),
        "models": ", ".join(SHIPPED),
        "devices": f"{devices} ({jax.devices()[0].device_kind})",
        "implementations": describe_implementations(),
    }
    for name, choices in rows.items():
        print(f"{name:<17}{choices}")


if __name__ == "__main__":
    sys.exit(run_command(NAME, main, sys.argv[1:]))
