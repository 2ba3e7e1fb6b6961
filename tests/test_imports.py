"""Dependencies point one way (design, section 7); importing changes nothing; commands are quiet."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE, KERNELS = ROOT / "treejax", ROOT / "pallas_kernels"

# From the bottom up. A module may import from the lines above its own, and from its own line.
LAYERS = [
    "shapes config stats text tensors progress",
    "tree sampling processing history settings delta_rule parameters",
    "paths policies",
    "state layers",
    "model mtp",
    "families drafters saving scoring",
    "export checkpoint steps",
    "requests",
    "loop",
    "engine",
    "agreement training",
    "cli",
    "ablation",
    "audit",
    "generate compare train evaluate ablate",
]
COMMANDS = ["generate", "compare", "train", "evaluate", "ablate"]
NEVER = {  # whatever the order allows
    "policies": "layers model state drafters",
    "drafters": "policies state model steps",
    "families": "model layers state tree",
    "sampling": "tree",
}


def names_in(path):
    """Full names of all that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imports_of(path):
    """Top-level parts of treejax that a file imports: 'steps' for steps.verify."""
    return {name.split(".")[1] for name in names_in(path) if name.startswith("treejax.")}


def part_of(path):
    """The top-level part that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_every_part_has_a_place_in_the_order():
    placed = " ".join(LAYERS).split()
    assert sorted(placed) == sorted({part_of(path) for path in FILES})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    place = {part: level for level, line in enumerate(LAYERS) for part in line.split()}
    mine = part_of(path)
    for part in imports_of(path) - {mine}:
        assert place[part] <= place[mine], f"{mine} must not import {part}"
        assert part not in NEVER.get(mine, "").split(), f"{mine} must never see {part}"


def test_no_two_parts_import_one_another():
    """Within one line of the order too: no cycles among parts."""
    graph = {}
    for path in FILES:
        graph.setdefault(part_of(path), set()).update(imports_of(path) - {part_of(path)})
    ordered: list[str] = []
    while len(ordered) < len(graph):
        free = [p for p in graph if p not in ordered and graph[p] <= set(ordered)]
        assert free, f"a cycle among {sorted(set(graph) - set(ordered))}"
        ordered += free


SOURCES = sorted(KERNELS.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_see_arrays_only(path):
    assert not [name for name in names_in(path) if name.split(".")[0] == "treejax"]


def test_only_policies_and_what_stands_above_them_reach_kernels():
    """Drafters never do, and neither does the model."""
    users = {
        part_of(path)
        for path in FILES
        if any(name.split(".")[0] == "pallas_kernels" for name in names_in(path))
    }
    assert users == {"policies", "steps", "cli", "ablation", "audit"}


def test_nothing_imports_a_command():
    for path in [PACKAGE / "__init__.py", *FILES]:
        assert not imports_of(path) & (set(COMMANDS) - {part_of(path)}), path
        assert not [name for name in names_in(path) if "__main__" in name], path
        command = part_of(path) in COMMANDS or path.name == "__main__.py"
        if not command and part_of(path) not in ["cli", "ablation"]:
            assert "cli" not in imports_of(path), path


def test_the_oracle_imports_nothing_of_ours():
    for name in ("oracle.py", "oracle_model.py"):
        assert not imports_of(Path(__file__).parent / name)


PROBE = """
import json, sys
import jax
before = dict(jax.config.values)
backends = jax._src.xla_bridge._backends
import treejax
changed = [name for name, value in jax.config.values.items() if before[name] != value]
heavy = [name for name in ("optax", "orbax", "tensorstore", "matplotlib", "beartype", "hypothesis",
                           "jax.experimental.pallas", "treejax.audit") if name in sys.modules]
print(json.dumps([changed, heavy, list(backends), treejax.__all__]))
"""


def clean_environment(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name != "TREEJAX_TYPECHECK"}
    return kept | {"XDG_CACHE_HOME": str(tmp_path)}


def test_importing_changes_no_setting_and_loads_nothing_heavy(tmp_path):
    """No JAX configuration, no device, no cache folder; training libraries stay out."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    changed, heavy, backends, names = json.loads(done.stdout)
    assert (changed, heavy, backends) == ([], [], [])
    assert {"load_model", "complete", "stream", "verify", "publish", "Tree"} <= set(names)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [*COMMANDS, "audit"])
def test_a_command_writes_nothing_of_pythons_own_to_stderr(command, tmp_path):
    """``-m`` warns when the package has imported the command already; help goes to stdout."""
    done = subprocess.run(
        [sys.executable, "-m", f"treejax.{command}", "--help"],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m treejax." + command)
