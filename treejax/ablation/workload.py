"""What a request replay works on: the model, the requests in every mode, and what arms need."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from treejax.ablation.base import Context
from treejax.ablation.recorded import prompt_of, read_requests
from treejax.ablation.requests_settings import RequestSettings
from treejax.ablation.serving import Arm, Server, Task
from treejax.checkpoint import find_folder, load_model
from treejax.cli.chat import make_renderer
from treejax.cli.kernels import choose_implementation
from treejax.cli.passages import read_passages
from treejax.loop import state_rows
from treejax.model import Model
from treejax.requests import make_requests
from treejax.sampling import Sampling
from treejax.state import init_state

RECORDED = "recorded"
"""The mode of a request that brings its own sampling settings."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tasks in the order in which they run.

    Attributes:
      weight_bytes: of the model.
      notice: what the reader of the table has to know, or None.
    """

    server: Server
    tasks: tuple[Task, ...]
    weight_bytes: int
    notice: str | None

    def bytes_of(self, arm: Arm) -> dict[str, int]:
        """Bytes that an arm needs: weights, the state of one request, buffers of one verify."""
        model, server = self.server.model, self.server
        policy, drafter = server.policy(arm.policy), arm.drafter()

        def empty() -> Any:
            return init_state(model.config, 1, server.max_length, model.dtype, policy)

        leaves = jax.tree.leaves(jax.eval_shape(empty))
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        buffers = policy.buffers(model.config, drafter.capacity, 1)
        return {"weights": self.weight_bytes, "state": state} | buffers


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """One request as it was given, in a corpus; None is what the TOML says."""

    corpus: str
    name: str
    where: str
    content: str | tuple[int, ...]
    sampling: Sampling | None = None
    max_tokens: int | None = None
    seed: int | None = None


def load(
    settings: RequestSettings, arms: Sequence[Arm], context: Context, config: Path
) -> Workload:
    """Load the model and tokenise every request.

    Raises:
      ValueError: one line: a file, a request that the model cannot take, or an arm that it cannot
        run (no MTP head, kernels that do not fit).
    """
    prompts = _prompts(settings, context, config)  # first: a wrong path costs no loading
    model = load_model(context.checkpoint, context.dtype or "float32", fused=True)
    drafters = [arm.drafter() for arm in arms]
    largest = max(drafter.capacity for drafter in drafters)
    kernels = choose_implementation(context.implementation, model.config, largest)
    tasks: list[Task] = []
    short = 0
    bound = settings.most_prompt_tokens
    for prompt in prompts:
        made = _tasks(settings, model, prompt)
        if bound and len(made[0].tokens) > bound:
            continue
        short += made[0].budget < (prompt.max_tokens or settings.max_tokens)
        tasks += made
    if not tasks:
        raise ValueError(f"{config}: no prompt has at most most_prompt_tokens, {bound}: raise it")
    rows = state_rows(model, max(len(task.tokens) + task.budget for task in tasks))
    for drafter in drafters:
        drafter.init(model, 1, rows)  # refuses what it cannot draft for
    notices = [f"{short} requests end at the model's context"] if short else []
    if kernels.notice is not None:
        notices.append(f"no kernels: {kernels.notice}")
    server = Server(model, kernels.implementation, rows, settings.ignore_eos)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return Workload(server, tuple(tasks), weights, "; ".join(notices) or None)


def _tasks(settings: RequestSettings, model: Model, prompt: _Prompt) -> list[Task]:
    """One request in every mode, or in its own."""
    try:
        most = prompt.max_tokens or settings.max_tokens
        (request,) = make_requests(model, [prompt.content], most, ())
    except ValueError as error:
        raise ValueError(f"{prompt.where}: {error}") from None
    tokens = tuple(request.prompt)
    seed = settings.seed if prompt.seed is None else prompt.seed
    if prompt.sampling is not None:
        modes = {RECORDED: prompt.sampling}
    else:
        modes = {
            mode.name: Sampling() if mode.sampling is None else mode.sampling.sampling()
            for mode in settings.modes
        }
    return [
        Task(prompt.corpus, prompt.name, mode, tokens, request.budget, sampling, seed)
        for mode, sampling in modes.items()
    ]


def _prompts(settings: RequestSettings, context: Context, config: Path) -> list[_Prompt]:
    if context.requests is not None:
        if context.wheel is not None:
            raise ValueError("--requests brings its own prompts: leave out --wheel")
        return _recorded(context.requests, context.checkpoint)
    made = [
        _Prompt("prompts", f"prompt {i}", str(config), text)
        for i, text in enumerate(settings.prompts)
    ]
    files = [config.parent / name for name in settings.passages]
    if context.wheel is not None and not files:
        raise ValueError(f"{config} names no passages: leave out --wheel")
    for file in files:
        for name, text in read_passages(file, context.wheel).items():
            made.append(_Prompt(file.stem, name, f"{file}, {name}", text))
    names = [prompt.name for prompt in made]
    if not made or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), "no prompt")
        raise ValueError(f"{config} gives {twice}, expected prompts or passages, each once")
    return made


def _recorded(path: str, checkpoint: str | None) -> list[_Prompt]:
    """Requests of a JSON-lines file; the chat template is looked for when it is needed."""
    requests = read_requests(path)
    render = None
    made = []
    for name, (number, request) in requests.items():
        where = f"{path}, line {number}"
        try:
            if request.messages and render is None:
                render = make_renderer(find_folder(checkpoint))
            content = prompt_of(request, render)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        sampling = None if request.sampling is None else request.sampling.sampling()
        own = (sampling, request.max_tokens, request.seed)
        made.append(_Prompt(Path(path).stem, name, where, content, *own))
    return made
