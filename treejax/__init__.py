"""treejax: tree speculative decoding on recurrent-hybrid language models, in JAX.

Where to start reading: ``tree`` (what is verified), ``state`` (what a model knows of a prefix),
``delta_rule`` and ``policies`` (how a recurrent layer follows a tree), ``steps`` (verify, select,
publish), ``engine`` (the loop around them), ``drafters`` (what proposes). ``layers`` and ``model``
are the hybrid itself, ``families`` and ``checkpoint`` its files.

    model = treejax.load_model()
    print(treejax.complete(model, "def main():").text)
"""

from treejax.checkpoint import load_model, save_model
from treejax.config import ModelConfig
from treejax.engine import Generation, complete, stream
from treejax.loop import Piece
from treejax.model import Model, Output, prefill
from treejax.policies.choose import choose_policy
from treejax.sampling import Sampling, sample
from treejax.saving import restore_checkpoint, save_checkpoint
from treejax.scoring import score
from treejax.state import State, init_state, reset, with_policy
from treejax.steps.publish import publish
from treejax.steps.select import Choice, select
from treejax.steps.verify import verify
from treejax.tree import Tree

__all__ = [
    "Choice",
    "Generation",
    "Model",
    "ModelConfig",
    "Output",
    "Piece",
    "Sampling",
    "State",
    "Tree",
    "choose_policy",
    "complete",
    "init_state",
    "load_model",
    "prefill",
    "publish",
    "reset",
    "restore_checkpoint",
    "sample",
    "save_checkpoint",
    "save_model",
    "score",
    "select",
    "stream",
    "verify",
    "with_policy",
]
