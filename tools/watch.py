"""Play with a trained agent: the scores of whole games, and a video of one of them.

    python tools/watch.py runs/<run> --episodes 100             scores of 100 games, greedy actions
    python tools/watch.py runs/<run> --episodes 1 --video game.gif

Game and network are those of the script that made the run: of this repository, its examples/ or
its results/. Weights stay as they are, scores are not clipped. Where the run had --episodic-life,
games are whole all the same, and FIRE follows a lost life as in training. How many games each of
the parallel environments plays is fixed beforehand: the first to end would be the short ones.
Without sticky actions, greedy Atari games differ only in the no-ops at their start, so that some
of 100 are the same.

The video shows the first environment's first game, up to a minute of it. Which agent it shows is
in the .txt beside it. --csv writes a row for each game, with the agent in each row.
"""

import csv
import importlib
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
import tyro
from ale_py.vector_env import AtariVectorEnv
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
STEPS_PER_SECOND = 15  # of a video, as the console plays: 60 frames a second, 4 a step
LONGEST = 60 * STEPS_PER_SECOND  # steps of a video
HEIGHT = 420  # pixels of a video; a MinAtar game has 10


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # its folder
    episodes: int = 30  # whole games
    num_envs: int = 10  # environments that play them in parallel
    epsilon: float = 0.0  # share of random actions
    seed: int = 1  # of environments and random actions
    device: str = "auto"  # auto (CUDA where there is one, else the CPU), cpu, cuda:1, mps, ...
    csv: Path | None = None  # file for the scores
    video: Path | None = None  # .gif or .mp4


def fail(message, status=2):
    print(f"watch.py: {message}", file=sys.stderr)
    raise SystemExit(status)


def first_line(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def check(args):
    limits = {"episodes": (1, 10**6), "num_envs": (1, 1024), "epsilon": (0, 1), "seed": (0, 2**30)}
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if not low <= value <= high:  # as NaN is not, either
            fail(f"--{name.replace('_', '-')} {value}: it must be from {low} to {high}")
    for path in (args.csv, args.video):
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            fail(f"{path}: no file can be written there")
    if args.video is not None and args.video.suffix not in (".gif", ".mp4"):
        fail(f"--video {args.video}: it must end in .gif or .mp4")


def load_script(name):
    """The module that trains, with the parts that the script of this name puts into it."""
    for path in (ROOT / name, ROOT / "examples" / name, *ROOT.glob(f"results/*/{name}")):
        if path.is_file():
            sys.path[:0] = [str(path.parent), str(ROOT)]
            importlib.import_module(path.stem)
    for path in ROOT.glob("*.py"):
        module = sys.modules.get(path.stem)
        if module is not None and module.SCRIPT == name:
            module.SCRIPT = "watch.py"  # its messages are ours now
            return module
    raise ValueError(f"there is no {name} in {ROOT.name}, examples or results")


def load_run(args):
    """Its script, arguments, environments, what acts in them, and which agent that is."""
    try:
        name = json.loads((args.run / "config.json").read_text())["script"]
        if not re.fullmatch(r"\w+\.py", name):
            raise ValueError(f"its script is {name}")
        checkpoint = torch.load(args.run / "checkpoint.pt", map_location="cpu", weights_only=True)
        script = load_script(name)
        run = script.Args(**checkpoint["args"])
        agent = {"script": name, "env_id": run.env_id, "seed": run.seed}
        agent |= {"global_step": checkpoint["global_step"], "adapt_rollout": run.adapt_rollout}
        run.device = args.device
        run.num_envs = min(args.num_envs, args.episodes)
        run.fire_after_lost_life = getattr(run, "episodic_life", False)
        run.episodic_life = False  # whole games
        envs = script.make_envs(run)
        make_network = getattr(script, "ActorCritic", None) or script.QNetwork
        sizes = [run.size] if hasattr(run, "size") else []  # pqn_abs_xl.py
        network = make_network(envs, *sizes)
        network.load_state_dict(checkpoint["network"])
        act = make_actor(script, run, checkpoint, envs, network)
    except Exception as error:  # torn, foreign and wrong files have about ten ways to show it
        fail(f"{args.run} holds no run that can be played: {first_line(error)}")
    return script, run, envs, act, agent


def make_actor(script, run, checkpoint, envs, network):
    """act(observations): (E, ...) -> greedy actions (E,), or a Gaussian policy's means (E, A)."""
    if "observations" in checkpoint:  # ppo_abs_continuous.py scales by moments, frozen here
        space = envs.single_action_space
        normalizer = script.Normalizer(envs, run.gamma)
        normalizer.observations.load_state_dict(checkpoint["observations"])

        def act(observations):
            means, _ = network(torch.from_numpy(normalizer.scale(observations)))
            return means.numpy().clip(space.low, space.high)

        return act
    device, bfloat16 = script.pick_device(run)
    network.to(device)

    def act(observations):
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            outputs = network(torch.from_numpy(observations).to(device))
        scores = outputs[0] if isinstance(outputs, tuple) else outputs  # logits, or Q-values
        return scores.float().argmax(-1).numpy(force=True)

    return act


class Video:
    """The first environment's first game: its twin with the same seed gets the same actions."""

    def __init__(self, script, run, args):
        run.num_envs = 1
        colours = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
        script.AtariVectorEnv = partial(AtariVectorEnv, **colours)
        self.envs = script.make_envs(run)
        self.is_atari = isinstance(self.envs, AtariVectorEnv)
        if not self.is_atari:
            self.envs.envs[0].unwrapped.render_mode = "rgb_array"
        self.observations, _ = self.envs.reset(seed=args.seed)
        self.steps_left = LONGEST
        self.path = args.video
        self.part = self.path.with_name(f"{self.path.stem}.part{self.path.suffix}")
        options = {"fps": STEPS_PER_SECOND, "macro_block_size": 2}
        if self.path.suffix == ".gif":
            options = {"duration": 1000 / STEPS_PER_SECOND, "loop": 0}
        self.writer = imageio.get_writer(self.part, **options)
        self.draw()

    def draw(self):
        picture = self.observations[0, -1] if self.is_atari else self.envs.envs[0].render()
        if picture.dtype != np.uint8:  # MinAtar's colours are from 0 to 1
            picture = (255 * picture).astype(np.uint8)
        scale = max(1, HEIGHT // len(picture))
        self.writer.append_data(picture.repeat(scale, 0).repeat(scale, 1))

    def step(self, actions):
        """Take the first of the actions (E,)."""
        if self.steps_left == 0:
            return
        self.observations, _, terminated, truncated, _ = self.envs.step(actions[:1])
        self.steps_left -= 1
        if terminated[0] or truncated[0]:
            self.steps_left = 0
        else:
            self.draw()

    def close(self, text):
        """Only now does it take the place of an earlier one."""
        self.writer.close()
        os.replace(self.part, self.path)
        self.path.with_suffix(".txt").write_text(text + "\n")


@torch.no_grad()
def play(envs, act, args, fire_after_lost_life=False, video=None) -> list[tuple]:
    """Whole games of all environments: score, steps, and whether a limit of time ended it."""
    rng = np.random.default_rng((args.seed, 1))  # another stream than the action space's
    num_envs = envs.num_envs
    planned = [len(range(i, args.episodes, num_envs)) for i in range(num_envs)]
    games = []
    envs.action_space.seed(args.seed)
    observations, info = envs.reset(seed=args.seed)
    lives = info.get("lives")
    lost_life = np.zeros(num_envs, bool)
    score = np.zeros(num_envs)
    steps = np.zeros(num_envs, int)
    progress = tqdm(total=args.episodes, unit="game")
    while len(games) < args.episodes:
        actions = act(observations)
        explore = rng.random(num_envs) < args.epsilon
        actions[explore] = envs.action_space.sample()[explore]
        if fire_after_lost_life:
            actions[lost_life] = envs.fire_action
        if video is not None:
            video.step(actions)
        observations, reward, terminated, truncated, info = envs.step(actions)
        score += reward
        steps += 1
        ended = terminated | truncated
        if lives is not None:
            lost_life = (info["lives"] < lives) & ~ended
            lives = info["lives"]
        for i in np.flatnonzero(ended):
            if planned[i] > 0:
                planned[i] -= 1
                games.append((float(score[i]), int(steps[i]), bool(truncated[i])))
                progress.update()
        score[ended] = 0
        steps[ended] = 0
    progress.close()
    return games


def summary(games) -> str:
    scores = np.array([game[0] for game in games])
    text = f"{len(games)} games: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}, "
    text += f"min {scores.min():g}, max {scores.max():g}; "
    cut = sum(game[2] for game in games)
    return text + f"{len(set(games))} different by score and length, {cut} cut by the time limit"


def main(args):
    check(args)
    script, run, envs, act, agent = load_run(args)
    agent["epsilon"] = args.epsilon
    print(json.dumps(agent))
    video = None
    if args.video is not None:
        try:
            video = Video(script, run, args)
        except Exception as error:  # a package that draws or writes may be missing
            fail(f"--video {args.video}: {first_line(error)}")
    games = play(envs, act, args, run.fire_after_lost_life, video)
    print(summary(games))
    if video is not None:
        video.close(json.dumps(agent))
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow([*agent, "score", "steps", "truncated"])
            for game in games:
                table.writerow([*agent.values(), *game])


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except OSError as error:
        fail(error)
