"""How much the component audit does."""

import dataclasses

from treejax.audit.component.operands import HYDRA, Shape

SMALL = Shape(layers=2, batch=4, key_heads=1, value_heads=2, key_dim=16, value_dim=16)
RANDOM = (
    Shape(2, 3, key_heads=1, value_heads=3, key_dim=32, value_dim=16, rows=8, depth=7),
    Shape(2, 3, key_heads=2, value_heads=4, key_dim=24, value_dim=40, rows=16),
    Shape(2, 1, key_heads=2, value_heads=8, key_dim=16, value_dim=64, rows=64, depth=40),
    Shape(2, 3, key_heads=2, value_heads=2, key_dim=64, value_dim=32, rows=40, depth=12),
)
"""Random trees in any packing order: capacities 8 to 64, ratios of heads 1 to 4, one and three
sequences. A depth of 40 is more than a ring holds: there it writes at once."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the component audit; the defaults are LumoTree's protocol at the shipped model's
    recurrent shape.

    Attributes:
      shape: of the protocol's operand sets; its rows hold hydra27 with its four masked rows.
      sets: operand sets a split (calibration, held-out).
      steps: in a row, for the shape and for each of ``random``; ``journeys`` times each.
      random: shapes of the random trees.
      strikes: at least so many of every control, at the shape ``controls``.
      processes, runs: fresh processes, and how often each block runs in each of them.
      seed: of everything that is drawn.
    """

    shape: Shape = Shape()
    sets: int = 2
    steps: int = 5
    journeys: int = 2
    random: tuple[Shape, ...] = RANDOM
    strikes: int = 100
    controls: Shape = dataclasses.replace(SMALL, batch=12, key_dim=32, value_dim=32)
    processes: int = 2
    runs: int = 2
    seed: int = 0

    def __post_init__(self):
        for name in ("sets", "journeys", "strikes", "runs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.steps < 5:
            raise ValueError(
                f"steps is {self.steps}, expected at least 5: a ring of two commits is written in "
                "the third, and only its second filling finds old rows behind its end"
            )
        if self.processes < 0:
            raise ValueError(f"processes is {self.processes}, expected 0 or more")
        for name in ("shape", "controls"):
            shape = getattr(self, name)
            if shape.rows < len(HYDRA) + 4 or shape.depth < 11:
                raise ValueError(
                    f"{name} has {shape.rows} rows and depth {shape.depth}, expected at least "
                    f"{len(HYDRA) + 4} and 11: hydra27 with its masked rows must fit"
                )
        if self.controls.layers < 2 or self.controls.batch < 2:
            raise ValueError(
                "controls needs two layers and two sequences, or nothing can be swapped"
            )

    @classmethod
    def quick(cls) -> "Settings":
        """Seconds: one small shape, each block once here and once in a fresh process."""
        return cls(SMALL, 1, 5, 1, (), 8, SMALL, 1, 1)

    @classmethod
    def paper(cls) -> "Settings":
        """48 layers of the paper's widths, for a GPU and a host with 100 GB."""
        large = Shape(48, 1, key_heads=16, value_heads=48, key_dim=128, value_dim=128)
        return cls(shape=large)
