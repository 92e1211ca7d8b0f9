"""The tutorial runs from its first cell to its last; as committed, it reads without being run."""

import json
import re
import shutil

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "tutorial.ipynb"
NEEDED = ["tutorial.ipynb", "pqn_abs.py", "examples/minatar_abs.py"]
PICTURES = 7


def test_committed_outputs_are_complete_and_clean():
    source = NOTEBOOK.read_text()
    assert len(source.encode()) < 400_000
    assert source.count('"image/png"') == PICTURES
    assert "PQN with ABS, seed 2: return" in source
    for cell in json.loads(source)["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] in ("stream", "display_data")
            assert output.get("name") != "stderr"  # neither warnings nor progress bars
            assert not re.search("/(tmp|home|root|work|usr)/", json.dumps(output.get("text", "")))


@pytest.mark.slow
def test_tutorial_runs(tmp_path):
    """In a folder with nothing but the files it names, on a kernel of its own."""
    (tmp_path / "examples").mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path / name)
    notebook = nbformat.read(tmp_path / "tutorial.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": tmp_path}}).execute()
    result = nbformat.writes(notebook)
    assert result.count('"image/png"') == PICTURES
    returns = re.findall(r"seed \d: return ([\d.]+)", result)
    assert len(returns) == 4 and min(map(float, returns)) > 2  # a random policy has 0.4
    first, last = map(float, re.findall(r"mean δ of the .* 50 updates: +([\d.]+)", result))
    assert 0.05 < last < 0.75 * first
