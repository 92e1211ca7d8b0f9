"""The tutorial runs from its first cell to its last; as committed, it reads without being run."""

import json
import math
import re
import shutil

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "tutorial.ipynb"
NEEDED = ["tutorial.ipynb", "pqn_abs.py", "examples/minatar_abs.py"]
TELL = """
import json
tables = {"fixed": [run.tolist() for run in fixed_runs], "abs": [run.tolist() for run in abs_runs]}
print(json.dumps(tables))
"""


def printed(notebook):
    """What the cells print on stdout, as one text."""
    text = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stdout":
                text += output.text
    return text


def pictures(notebook):
    """The number of pictures that each cell of code draws."""
    counts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            counts.append(sum("image/png" in output.get("data", {}) for output in cell.outputs))
    return counts


def test_committed_outputs_are_complete_and_clean():
    source = NOTEBOOK.read_text()
    notebook = nbformat.reads(source, as_version=4)
    assert len(source.encode()) < 400_000
    assert notebook.metadata.kernelspec.name == "python3"
    assert pictures(notebook)[-3:] == [1, 1, 1]
    assert "PQN with ABS, seed 2: return" in printed(notebook)
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
    committed = pictures(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells.append(nbformat.v4.new_code_cell(TELL))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=where).execute()
    tables = json.loads(notebook.cells.pop().outputs[0].text)

    assert pictures(notebook) == committed
    assert len(tables["fixed"]) == len(tables["abs"]) == 2
    for run in tables["fixed"]:
        assert {length for _, _, _, length in run} == {32}
    for run in tables["abs"]:  # L follows δ by Eq. 4, computed once more
        adaptive_length = 32
        for _, _, divergence, length in run:
            assert abs(length - adaptive_length) <= 0.501
            alpha = math.log(min(max(divergence, 0.05), 0.95) / 0.05) / math.log(0.95 / 0.05)
            adaptive_length = 0.9 * adaptive_length + 0.1 * (64 - alpha * (64 - 16))
        assert len({length for _, _, _, length in run}) > 5
    for run in tables["fixed"] + tables["abs"]:
        assert run[0][1] < 1 and run[-1][1] > 2  # a random policy has 0.4
    churn = re.findall(r"mean δ of the .* 50 updates: +([\d.]+)", printed(notebook))
    first, last = map(float, churn)
    assert 0.05 < last < 0.75 * first
