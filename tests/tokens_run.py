"""p3o_tokens.py in a process of its own:  tokens_run.py [its arguments]

Its first twelve updates go through, those of the imitation included. Each later one waits while the
file that HOLD names exists, and HOLD.reached tells that one does.
"""

import os
import time
from pathlib import Path

import torch

import p3o_tokens


class HeldTransformer(p3o_tokens.CausalTransformer):
    def __init__(self):
        super().__init__(width=16, heads=2, layers=1)
        self.updates = 0

    def forward(self, tokens):
        self.updates += torch.is_grad_enabled()
        path = os.environ.get("HOLD", "")
        while self.updates > 12 and os.path.exists(path):
            Path(f"{path}.reached").touch()
            time.sleep(0.01)
        return super().forward(tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)
    p3o_tokens.launch(CausalTransformer=HeldTransformer)
