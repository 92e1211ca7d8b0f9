"""What is written twice in the repository says the same twice."""

import ast
import copy
import difflib
import re
import tomllib

import pytest
import torch
from helpers import ROOT, Noise, SmallNetwork, start

SCRIPTS = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}
MAY_DIFFER = {"Args", "main"}  # each script has arguments and a loop of its own
NETWORK_OF_ITS_OWN = {"pqn_abs_xl.py"}


def definitions(source):
    """The source text of each function, class and constant at the top level, by its name."""
    texts = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for target in targets:
            name = getattr(target, "name", None) or getattr(target, "id", None)
            if name and not isinstance(node, ast.Import | ast.ImportFrom):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                texts[name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return texts


def drifted(scripts, may_differ):
    """The names that two scripts share without sharing the text, with the scripts' names."""
    first, drift = {}, []
    for script, source in scripts.items():
        for name, text in definitions(source).items():
            original, expected = first.setdefault(name, (script, text))
            if text != expected and name not in may_differ:
                drift.append(f"{name} in {script} differs from {original}")
    return drift


def inline_dependencies(source):
    """The dependencies in a script's inline metadata (PEP 723)."""
    block = re.search(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+?)^# ///$", source)
    return tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))["dependencies"]


README = re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / "README.md").read_text())
PROGRAMS = [block for block in README if "import pqn_abs" in block]  # they replace parts of the script
QUOTES = "\n".join(block for block in README if block not in PROGRAMS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_inline_metadata_equals_requirements(script):
    assert inline_dependencies(SCRIPTS[script]) == (ROOT / "requirements.txt").read_text().splitlines()


def test_scripts_share_what_they_share_word_for_word():
    drift = drifted(SCRIPTS, MAY_DIFFER)
    assert drift == [f"QNetwork in {script} differs from gns_baseline.py" for script in sorted(NETWORK_OF_ITS_OWN)]


@pytest.mark.parametrize(
    "original, script, name, lines",
    [
        ("pqn_abs.py", "pqn_abs_xl.py", "Args", 7),
        ("pqn_abs.py", "pqn_abs_xl.py", "main", 6),
        ("pqn_abs.py", "gns_baseline.py", "Args", 21),
        ("pqn_abs.py", "gns_baseline.py", "main", 35),
        ("ppo_abs.py", "p3o_abs.py", "Args", 14),
        ("ppo_abs.py", "p3o_abs.py", "main", 67),
        ("pqn_abs.py", "ppo_abs.py", "main", 192),
    ],
)
def test_what_may_differ_differs_in_known_lines_only(original, script, name, lines):
    """The number of lines that only one of the two has. Who changes a line in one script alone changes the number."""
    ours, theirs = (definitions(SCRIPTS[file])[name].splitlines() for file in (original, script))
    difference = [line for line in difflib.ndiff(ours, theirs) if line[0] in "+-"]
    assert len(difference) == lines, "\n".join(difference)


def test_drift_is_found():
    a = "X = 1\n\n@cache\ndef f(x):\n    return x\n\ndef main():\n    a\n\nclass A:\n    pass\n"
    assert drifted({"a.py": a, "b.py": a.replace("    a", "    b")}, {"main"}) == []
    assert drifted({"a.py": a, "b.py": a.replace("    a", "    b")}, set()) == ["main in b.py differs from a.py"]
    assert drifted({"a.py": a, "b.py": a.replace("return x", "return  x")}, {"main"}) == ["f in b.py differs from a.py"]
    assert drifted({"a.py": a, "b.py": a.replace("@cache\n", "")}, {"main"}) == ["f in b.py differs from a.py"]
    assert drifted({"a.py": a, "b.py": a.replace("X = 1", "X = 2")}, {"main"}) == ["X in b.py differs from a.py"]
    assert drifted({"a.py": a, "b.py": a.replace("pass", "y = 1")}, {"main"}) == ["A in b.py differs from a.py"]
    assert drifted({"a.py": a, "b.py": "def g(x):\n    return x\n"}, set()) == []


def test_metadata_is_read():
    script = '# /// script\n# dependencies = [\n#     "torch>=2",\n# ]\n# ///\n"""Doc."""\n'
    assert inline_dependencies(script) == ["torch>=2"]


def test_readme_quotes_the_script_word_for_word():
    quoted, script = definitions(QUOTES), definitions(SCRIPTS["pqn_abs.py"])
    common = quoted.keys() & script.keys()
    assert common >= {"behavioral_divergence", "rollout_length"}
    assert {name: quoted[name] for name in common} == {name: script[name] for name in common}


def test_readme_quotes_run():
    """All of them together, with a policy that is the same after each update."""
    names = {"copy": copy, "iterations": 101, "policy": SmallNetwork(Noise(1)), "learn": lambda policy: None}
    names["collect"] = lambda policy, length: torch.randint(256, (4 * length, 6), dtype=torch.uint8)
    exec(QUOTES, names)
    assert names["length"] == pytest.approx(64 - 32 * 0.9**3)


@pytest.mark.parametrize("program", PROGRAMS)
def test_readme_program_runs(tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(program)
    options = "--env-id CartPole-v1 --num-envs 4 --total-timesteps 500 --precision float32".split()
    process = start("program.py", *options)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert list(tmp_path.glob("runs/CartPole-v1*/checkpoint.pt"))
