"""Names of games, and human-normalised Atari scores: 0 is a random agent's mean, 1 a human's.

The scores of 57 games are in atari_scores.csv: Table 2 of Wang et al. 2016, "Dueling Network
Architectures for Deep Reinforcement Learning" (arXiv 1511.06581), where games start with up to 30
no-ops, as in the scripts here. The numbers equal those in google-deepmind/dqn_zoo (atari_data.py)
and mttga/purejaxql (atari_wrapper.py). Games have the names that Gymnasium gives them: Breakout, of
ALE/Breakout-v5.
"""

import csv
import re
from pathlib import Path


def reference_scores() -> dict[str, tuple[float, float]]:
    """The scores of the random agent and of the human, by game."""
    lines = Path(__file__).with_name("atari_scores.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {row["game"]: (float(row["random"]), float(row["human"])) for row in rows}


def game_name(env_id: str) -> str:
    """Breakout, of BreakoutNoFrameskip-v4, Breakout-v4 or ALE/Breakout-v5."""
    return re.sub(r"^ALE/|(NoFrameskip)?-v\d+$", "", env_id)


def title(env_id: str) -> str:
    """The name that people use: Space Invaders, of ALE/SpaceInvaders-v5 or space_invaders."""
    name = game_name(env_id).removeprefix("MinAtar/").replace("_", " ")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return words.title() if words.islower() else words
