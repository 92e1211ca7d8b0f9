"""ABS on an environment of your own: MinAtar, five small games in the style of Atari's, on one CPU core.

python examples/minatar_abs.py --env-id space_invaders                        PQN with ABS
python examples/minatar_abs.py --env-id space_invaders --no-adapt-rollout     the baseline, L = 32 throughout
python examples/minatar_abs.py --resume runs/.../checkpoint.pt                after Ctrl-C or a crash

Everything is pqn_abs.py's but two parts, which are replaced, and some defaults. It needs `pip install MinAtar`. With
networks as small as this one a second thread costs more than it gives: set OMP_NUM_THREADS=1, and run a seed a core.
"""

import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path

import minatar.environments
import torch.nn as nn
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from minatar.gym import BaseEnv

sys.path.append(str(Path(__file__).resolve().parents[1]))
import pqn_abs

GAMES = [module.name for module in pkgutil.iter_modules(minatar.environments.__path__)]
MAX_STEPS = 2501  # Freeway ends by itself after as many; the other games have no limit of their own


@dataclass
class Args(pqn_abs.Args):
    """PQN with Adaptive Batch Scaling on MinAtar."""

    env_id: str = "breakout"  # game: asterix, breakout, freeway, seaquest or space_invaders
    total_timesteps: int = 1_000_000  # [T_total] environment steps
    num_envs: int = 32  # [E] environments in parallel
    learning_rate: float = 1e-3  # learning rate of RAdam, constant
    num_minibatches: int = 16  # mini-batches per epoch; each grows with the rollout, as their number is fixed
    end_e: float = 0.05  # [ε] share of random actions after exploration
    adapt_frequency: int = 10  # [K] iterations from one measurement of BD to the next
    precision: str = "float32"  # of all layers but the last: float32, bfloat16 or auto


class QNetwork(nn.Module):
    """PQN's network for MinAtar: bool images (N, 10, 10, C) -> Q-values (N, A)."""

    def __init__(self, envs):
        super().__init__()
        channels, actions = envs.single_observation_space.shape[2], int(envs.single_action_space.n)
        self.conv = pqn_abs.layer_init(nn.Conv2d(channels, 16, 3))
        self.norm = nn.LayerNorm(16)  # over the channels of each pixel, as in PQN's code
        hidden = [pqn_abs.layer_init(nn.Linear(8 * 8 * 16, 128)), nn.LayerNorm(128), nn.ReLU()]
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), *hidden, pqn_abs.layer_init(nn.Linear(128, actions)))

    def forward(self, images):
        features = self.conv(images.float().permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.head(self.norm(features)).float()


def make_envs(args: Args) -> SyncVectorEnv:
    """MinAtar's defaults: an action is repeated with probability 0.1, and games get harder; only actions that matter.

    Learning sees the sign of the reward, which is 0 or 1 anyway, but for Seaquest's bonus.
    """
    if args.env_id not in GAMES:
        pqn_abs.fail(f"--env-id {args.env_id} is no MinAtar game; take one of {', '.join(GAMES)}")
    game = lambda: TimeLimit(BaseEnv(args.env_id, use_minimal_action_set=True), MAX_STEPS)  # noqa: E731
    return SyncVectorEnv([game] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


if __name__ == "__main__":
    pqn_abs.Args, pqn_abs.QNetwork, pqn_abs.make_envs = Args, QNetwork, make_envs
    pqn_abs.main(pqn_abs.parse_args())
