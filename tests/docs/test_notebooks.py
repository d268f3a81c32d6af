"""The notebooks run from top to bottom in a fresh kernel and are stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["first_steps.ipynb", "plan.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert [cell.execution_count for cell in code] == [None] * len(code)
    assert path.read_text() == nbformat.writes(notebook) + "\n", (
        "write it with nbformat, so that differences stay small"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning"
)  # of the kernel's own libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    printed = "".join(
        out.get("text", "")
        for cell in notebook.cells
        for out in cell.get("outputs", [])
    )
    if path.stem == "first_steps":
        assert "def " in printed
        assert Path(tmp_path, "runs", "first", "report.html").exists()
    else:
        assert printed.count("MiB per device") >= 3
