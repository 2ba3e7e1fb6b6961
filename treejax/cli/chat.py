"""Chat messages as a prompt, by the template that a model's folder brings.

A template is a Jinja program that Hugging Face folders keep in ``tokenizer_config.json`` or in
``chat_template.jinja``. It is rendered as transformers does, in Jinja's sandbox. treejax has no
template of its own: a guessed one would be another prompt than the model was trained on.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from treejax.tensors import read_json


def make_renderer(folder: Path) -> Callable[[Sequence[dict[str, str]]], str]:
    """A function from messages (``role``, ``content``) to the text that a reply follows.

    Raises:
      ValueError: one line: the folder has no template, Jinja is missing, or (from the function) the
        template refuses the messages.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    template = _find_template(folder, settings)
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError(
            "chat messages need Jinja for the model's template (pip install 'treejax[chat]'), or "
            "record the prompt's text or tokens instead"
        ) from None

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    jinja.filters["tojson"] = to_json
    jinja.globals["raise_exception"] = refuse
    special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}
    try:
        compiled = jinja.from_string(template)
    except TemplateError as error:
        raise ValueError(f"{folder}: its chat template cannot be read: {_first(error)}") from None

    def render(messages: Sequence[dict[str, str]]) -> str:
        try:
            return compiled.render(
                messages=list(messages), add_generation_prompt=True, tools=None, **special
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses: {_first(error)}") from None

    return render


def _find_template(folder: Path, settings: dict[str, Any]) -> str:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is for plain conversation
        template = {each["name"]: each["template"] for each in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): record the prompt's text or tokens instead"
        )
    return template


def _text(token: Any) -> str:
    """A special token's text: folders write it plainly, or as an object with ``content``."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _first(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
