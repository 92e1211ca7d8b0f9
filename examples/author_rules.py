"""PQN with ABS by the rules of the code that the paper's author published (daisophila/ABS).

    python examples/author_rules.py --env-id BreakoutNoFrameskip-v4

pqn_abs.py follows the paper, and L moves differently there. By the author's rules L stays at L_min
until δ has been measured 10 times. Then the mean of the last 20 measurements drives L. The target
of Eq. 4 and L itself are truncated to integers at every step of the moving average, so that L never
gets above 55 of 64. An iteration makes max(2, 2 L // 32) epochs.
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
    scale_epochs: bool = True  # where L > 32, make N_epochs * L // 32 passes


class AuthorRules:
    """Takes the place of rollout_length. A checkpoint keeps its state_dict."""

    def __init__(self):
        self.divergences = deque(maxlen=20)  # the last measurements of δ

    def __call__(self, divergence, length, *, beta, **limits):
        self.divergences.append(divergence)
        if len(self.divergences) < 10:
            return length
        mean = sum(self.divergences) / len(self.divergences)
        # With β = 1, Eq. 4 is its target alone.
        target = int(pqn_abs.rollout_length(mean, length, beta=1.0, **limits))
        return float(int((1 - beta) * length + beta * target))

    def state_dict(self):
        return {"divergences": list(self.divergences)}

    def load_state_dict(self, state):
        self.divergences = deque(state["divergences"], maxlen=20)


if __name__ == "__main__":
    pqn_abs.launch(Args, rollout_length=AuthorRules())
