"""The README's code runs, and its links lead somewhere."""

import re

import pytest
import torch
from helpers import ROOT

import pqn_abs

README = (ROOT / "README.md").read_text()
(LOOP,) = re.findall(r"(?ms)^```python\n(.*?)^```", README)


def test_the_loop_runs():
    """A policy that stops changing: L rises from 32 towards 64, once every 50 iterations."""
    names = vars(pqn_abs) | {"length": 32.0, "learn": lambda network, rollout: None}
    names |= {"q_network": torch.nn.Linear(6, 3), "old_network": torch.nn.Linear(6, 3)}
    names["collect"] = lambda network, length: {"observations": torch.rand(4 * length, 6)}
    limits = {"rollout_min": 16, "rollout_max": 64, "delta_min": 0.05, "delta_max": 0.95}
    names["limits"] = limits | {"beta": 0.1}
    for iteration in range(1, 101):
        names["iteration"] = iteration
        exec(LOOP, names)
    assert names["length"] == pytest.approx(64 - 32 * 0.9**2)


def test_every_linked_file_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]
    for page in pages:
        text = page.read_text()
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)
        for link in links:
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
