"""The README's code is the scripts' code, and it runs."""

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```", README)
BLOCKS = [block for block in BLOCKS if "transformers" not in block]  # it needs a download


def functions(source):
    texts = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            texts[node.name] = ast.get_source_segment(source, node)
    return texts


def test_pasted_functions_are_the_scripts():
    """Who pastes from the README gets what pqn_abs.py runs."""
    script = functions((ROOT / "pqn_abs.py").read_text())
    pasted = functions("\n".join(BLOCKS))
    assert set(pasted) == {"behavioral_divergence", "rollout_length"}
    for name, text in pasted.items():
        assert text == script[name]


def test_pasted_loop_runs():
    """A policy that stops changing: L rises from 32 towards 64, once every 50 iterations.

    With dropout, it would seem to change unless it is measured in eval mode.
    """
    names = {
        "policy": torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout()),
        "learn": lambda policy, rollout: None,
        "collect": lambda policy, length: {"observations": torch.rand(4 * length, 6)},
        "total_timesteps": 4 * (50 * 32 + 50 * 35 + 10),
    }
    exec("\n".join(BLOCKS), names)
    assert names["length"] == pytest.approx(64 - 32 * 0.9**2)
    assert names["policy"].training


def test_every_linked_file_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
