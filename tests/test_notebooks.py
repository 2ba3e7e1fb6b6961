"""Every notebook runs from top to bottom in a fresh kernel, and is committed without what it shows.

Warnings are errors in the kernel as they are here, and JAX is as strict. A kernel starts with an
empty cache folder, so that nothing compiled before helps it.
"""

import ast
import base64
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOKENS = {"03_acceptance"}  # show tokens alone: XLA leaves out most optimisations
HANGS = 300  # seconds a cell may take before it is given up; no measure of speed
LONGEST = {"05_your_own_policy": 22}  # lines of a function or class; 10 in all others
FIRST_CELL = """
import sys, warnings
warnings.simplefilter("error")
print(sys.executable)
"""

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, nbformat.NO_CONVERT)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def kernel_environment(tmp_path_factory):
    """Of a kernel that finds no program, font list or history of an earlier run."""
    folder = str(tmp_path_factory.mktemp("home"))
    return os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "XDG_CACHE_HOME": folder,
        "IPYTHONDIR": folder,
    }


def outputs_of(notebook, kind):
    """All outputs of a type, in order."""
    found = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in found if output.output_type == kind]


@pytest.mark.slow
@each
def test_notebook_runs(path, kernel_environment, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))  # no kernel of another installation
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FIRST_CELL))
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=HANGS, kernel_name="python3", resources=where)
    fast = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if path.stem in TOKENS else {}
    client.execute(env=kernel_environment | fast)

    assert code_cells(notebook)[0].outputs[0].text.strip() == sys.executable
    figures = [o for o in outputs_of(notebook, "display_data") if "image/png" in o.data]
    assert len(figures) == 1, "expected one figure that makes a point"
    assert base64.b64decode(figures[0].data["image/png"]).startswith(b"\x89PNG")


@each
def test_nothing_that_a_run_made_is_committed(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert re.fullmatch("[a-z]+(-[a-z]+)*", cell.id), "expected an id that names the cell"
        assert cell.metadata == {}, cell.id
    for cell in code_cells(notebook):
        assert (cell.outputs, cell.execution_count) == ([], None), cell.id


@each
def test_notebook_defines_little(path):
    """What is longer belongs into the package, where it is tested."""
    for cell in code_cells(read(path)):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                lines = cell.source.splitlines()[first - 1 : node.end_lineno]
                count = sum(bool(line.strip()) for line in lines)
                assert count <= LONGEST.get(path.stem, 10), f"{node.name} has {count} lines"


def test_the_readme_names_every_notebook():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]
    for path in NOTEBOOKS:
        assert path.name in readme
