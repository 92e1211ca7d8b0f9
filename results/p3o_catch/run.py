"""P3O against PPO on stale data: Catch, the pixel task of the tests, with several epochs and replayed rollouts.

python results/p3o_catch/run.py              all runs, into results/p3o_catch/returns.csv, and the table of them

Both are p3o_abs.py, on the same environments, data, values and value loss; for PPO its loss of the policy is replaced
by ppo_abs.py's clipped surrogate. The network is small, for speed: a hidden layer of 64 over a pixel of each cell. A
run's result is the mean return of the last 100 episodes, the mean over the run's last tenth.
"""

import csv
import itertools
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
EPOCHS, REPLAYS, SEEDS, LOSSES = (1, 4, 16), (0, 4), range(1, 6), ("PPO", "P3O")
SETTING = {
    "total_timesteps": 20_000,
    "num_envs": 8,
    "num_steps": 32,
    "learning_rate": 1e-3,
    "episodic_life": False,
    "checkpoint_every": 1e6,
}


def run(cell: tuple) -> tuple:
    """The cell, the run's return, and its mean ESS, KL to the behaviour policy and share of capped (clipped) ratios."""
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "tests")]
    import torch
    import torch.nn as nn
    from catch import Catch

    import p3o_abs
    import ppo_abs

    class Network(nn.Module):
        def __init__(self, envs):
            super().__init__()
            layer = p3o_abs.layer_init
            self.body = nn.Sequential(nn.Flatten(), layer(nn.Linear(4 * 6 * 6, 64)), nn.ReLU())
            self.actor, self.critic = layer(nn.Linear(64, 3), gain=0.01), layer(nn.Linear(64, 1), gain=1.0)

        def forward(self, frames):
            x = self.body(frames[:, :, ::14, ::14].float() / 255)  # a pixel of each cell
            return self.actor(x), self.critic(x).squeeze(1)

    def ppo_loss(log_pi, log_behavior, actions, advantages):
        log_probs, old = (x.gather(1, actions[:, None]).squeeze(1) for x in (log_pi, log_behavior))
        ratios = (log_probs - old).exp()
        kl = p3o_abs.kl_divergence(log_pi, log_behavior).mean().detach()
        clipped = ((ratios - 1).abs() > 0.1).float().mean()
        ess = p3o_abs.effective_sample_size((log_probs - old).detach())
        return ppo_abs.clipped_surrogate(log_probs, old, advantages, 0.1).mean(), ess, kl, clipped

    torch.set_num_threads(1)
    loss, epochs, replay, seed = cell
    p3o_abs.make_envs, p3o_abs.ActorCritic = lambda args: Catch(args.num_envs), Network
    if loss == "PPO":
        p3o_abs.p3o_loss = ppo_loss
    sys.stdout = sys.stderr = open(os.devnull, "w")
    with tempfile.TemporaryDirectory() as folder:
        args = {"seed": seed, "update_epochs": epochs, "replay_rollouts": replay, "precision": "float32"}
        run = p3o_abs.main(p3o_abs.Args(**args, **SETTING, runs_dir=folder))
        with open(run / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
    score = np.mean([float(row["charts/episodic_return"]) for row in rows[-len(rows) // 10 :]])
    return *cell, score, *(np.mean([float(row[f"p3o/{name}"]) for row in rows]) for name in ("ess", "kl", "capped"))


def main() -> None:
    cells = itertools.product(LOSSES, EPOCHS, REPLAYS, SEEDS)
    spawn = get_context("spawn")  # a process for each, as what one replaces must not stay for the next
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        results = list(pool.map(run, cells))
    with open(HERE / "returns.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("loss epochs replayed_rollouts seed return ess kl capped".split())
        writer.writerows([*row[:4], *(f"{x:.4f}" for x in row[4:])] for row in results)
    print("| epochs | replayed rollouts | PPO | P3O | ESS of PPO | ESS of P3O |\n|---|---|---|---|---|---|")
    for epochs, replay in itertools.product(EPOCHS, REPLAYS):
        ours = {loss: np.array([row[4:] for row in results if row[:3] == (loss, epochs, replay)]) for loss in LOSSES}
        scores = (f"{x[:, 0].mean():.2f} ± {x[:, 0].std(ddof=1):.2f}" for x in ours.values())
        print(f"| {epochs} | {replay} |", " | ".join([*scores, *(f"{x[:, 1].mean():.2f}" for x in ours.values())]), "|")


if __name__ == "__main__":
    main()
