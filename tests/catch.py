"""Catch: a ball falls, a paddle moves to meet it. The smallest task that needs frames, actions and a return."""

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

CELLS, PIXELS = 6, 14  # 6 x 6 cells of 14 x 14 pixels make 84 x 84


class Catch(gymnasium.vector.VectorEnv):
    """num_envs games at once. An episode lasts 5 steps and ends with +1 (ball on paddle) or -1 (ball on floor).

    Observations are uint8 (num_envs, 4, 84, 84), the last four frames. Actions: 0 is left, 1 stays, 2 is right.
    """

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.single_action_space = gymnasium.spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.ball, self.height, self.paddle = np.zeros((3, self.num_envs), dtype=int)
        self.obs = np.zeros(self.observation_space.shape, dtype=np.uint8)
        self.start(np.full(self.num_envs, True))
        return self.obs.copy(), {}

    def step(self, actions):
        self.paddle = np.clip(self.paddle + actions - 1, 0, CELLS - 1)
        self.height -= 1
        self.obs = np.concatenate([self.obs[:, 1:], self.draw()[:, None]], axis=1)
        final_obs, done = self.obs.copy(), self.height == 0
        reward = np.where(done, np.where(self.ball == self.paddle, 1.0, -1.0), 0.0)
        self.start(done)
        return self.obs.copy(), reward, done, np.zeros(self.num_envs, dtype=bool), {"final_obs": final_obs}

    def start(self, which):
        """Begin a new episode in some of the environments: four equal frames, the ball at the top."""
        self.ball[which], self.paddle[which] = self.rng.integers(CELLS, size=(2, which.sum()))
        self.height[which] = CELLS - 1
        self.obs[which] = self.draw()[which, None]

    def draw(self):
        cells, i = np.zeros((self.num_envs, CELLS, CELLS), dtype=np.uint8), np.arange(self.num_envs)
        cells[i, CELLS - 1, self.paddle] = 128
        cells[i, CELLS - 1 - self.height, self.ball] = 255
        return cells.repeat(PIXELS, axis=1).repeat(PIXELS, axis=2)
