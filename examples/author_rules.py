"""PQN with ABS by the rules of the code that the paper's author published (daisophila/ABS).

    python examples/author_rules.py --env-id BreakoutNoFrameskip-v4

They differ from pqn_abs.py, which follows the paper, in how L moves: L stays at L_min until 10
measurements of BD exist; then the mean of the last 20 drives it; and the target of Eq. 4 as well as
L itself are truncated to integers at every step of the moving average, so that L never gets above
55 of 64. They make max(2, 2 L // 32) epochs.
"""

import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import pqn_abs


@dataclass
class Args(pqn_abs.Args):
    """PQN with Adaptive Batch Scaling, by the rules of its author's code."""

    num_steps: int = 16  # [L] steps in each environment in the first rollout: L_min
    scale_epochs: bool = True  # N_epochs * L // 32 epochs where L > 32


class AuthorRules:
    """Takes the place of rollout_length; state_dict is what a checkpoint keeps of it."""

    def __init__(self):
        self.divergences = deque(maxlen=20)  # the last measurements

    def __call__(self, divergence, adaptive_length, *, beta, **limits):
        self.divergences.append(divergence)
        if len(self.divergences) < 10:
            return adaptive_length
        mean = sum(self.divergences) / len(self.divergences)
        target = int(pqn_abs.rollout_length(mean, adaptive_length, beta=1.0, **limits))  # L' alone
        return float(int((1 - beta) * adaptive_length + beta * target))

    def state_dict(self):
        return {"divergences": list(self.divergences)}

    def load_state_dict(self, state):
        self.divergences.extend(state["divergences"])


if __name__ == "__main__":
    pqn_abs.launch(Args, rollout_length=AuthorRules())
