"""Play with a trained agent: the scores of whole games, and a video of one of them.

    python tools/watch.py runs/<run> --episodes 100             scores of 100 games, greedy actions
    python tools/watch.py runs/<run> --episodes 1 --video game.gif

Game and network are those of the script that made the run. A script that is not in this repository
is run as the copy in the run's folder. p3o_tokens.py has no games. Scores are not clipped, and
games are whole, although a lost life ends the learner's episode. An agent of --no-episodic-life may
wait for FIRE until the time limit. How many games each of the parallel environments plays is fixed
beforehand: the first to end would be the short ones.

The video shows the first environment's first game, up to a minute of it. On Linux without a
screen, MuJoCo draws with MUJOCO_GL=egl; where that fails, set MUJOCO_GL=osmesa.
"""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
STEPS_PER_SECOND = 15  # of a video, as the console plays: 60 frames a second, 4 a step
LONGEST = 60 * STEPS_PER_SECOND  # steps of a video
HEIGHT = 420  # pixels of a video; a MinAtar game has 10


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # its folder
    episodes: int = 30  # whole games
    video: Path | None = None  # a .gif


def find_parts(script: str, run: Path) -> dict:
    """The names in a script; those that it lacks, of the script that it imports."""
    for folder in (ROOT, ROOT / "examples", *ROOT.glob("results/*"), run.resolve()):
        if (folder / f"{script}.py").is_file():
            sys.path[:0] = [str(folder), str(ROOT)]
            parts = vars(importlib.import_module(script))
            for path in ROOT.glob("*.py"):
                if path.stem in parts:
                    parts = vars(parts[path.stem]) | parts
            return parts
    raise ValueError(f"there is no {script}.py in this repository, nor in {run}")


def load_run(args):
    """Its environments, what acts in them, and what is filmed. Prints which agent it is."""
    config = json.loads((args.run / "config.json").read_text())
    script = Path(config["script"]).stem  # earlier runs have the .py, too
    parts = find_parts(script, args.run)
    if "make_envs" not in parts:
        raise ValueError(f"a run of {script}.py, which has no environments")
    run = parts["Args"](**config["args"])
    checkpoint = torch.load(args.run / "checkpoint.pt", map_location="cpu", weights_only=True)
    agent = {"script": script, "env_id": run.env_id, "seed": run.seed}
    agent |= {"global_step": checkpoint["global_step"], "adapt_rollout": run.adapt_rollout}
    print(json.dumps(agent), flush=True)
    if checkpoint.get("iteration") == 1:
        print("this is a run's first checkpoint: its policy has hardly learned", file=sys.stderr)
    run.num_envs = min(10, args.episodes)  # that play in parallel
    run.device = "cpu"
    envs = parts["make_envs"](run)
    if "RecordEpisodeStatistics" not in repr(envs):  # no game would ever count as over
        raise ValueError(f"make_envs of {script}.py lacks RecordEpisodeStatistics")
    network = parts.get("ActorCritic", parts.get("QNetwork"))(envs, run)
    network.load_state_dict(checkpoint["network"])
    normalizer = None
    if "observations" in checkpoint:  # ppo_abs_continuous.py scales by moments, frozen here
        normalizer = parts["Normalizer"](envs, run.gamma)
        normalizer.observations.load_state_dict(checkpoint["observations"])
    act = make_actor(envs.single_action_space, network, normalizer)
    filmed = None
    if args.video and isinstance(envs.unwrapped, AtariVectorEnv):
        filmed = atari_in_colour(run, parts, envs)
    return envs, act, filmed


def atari_in_colour(run, parts, envs):
    """One game at the console's resolution. With the same seed and actions it goes the same way."""
    spec = gymnasium.spec(run.env_id)
    filmed = AtariVectorEnv(
        spec.kwargs["game"],
        1,
        repeat_action_probability=spec.kwargs["repeat_action_probability"],
        autoreset_mode=AutoresetMode.SAME_STEP,
        grayscale=False,
        img_height=210,
        img_width=160,
        stack_num=1,
    )
    return parts["EpisodicLife"](filmed, envs.fire_action) if run.episodic_life else filmed


def make_actor(space, network, normalizer=None):
    """act(observations): (E, ...) -> greedy actions (E,), or a Gaussian policy's means (E, A)."""

    @torch.no_grad()
    def act(observations):
        if normalizer:
            observations = normalizer.scale(observations)
        output = network(torch.tensor(observations))
        if isinstance(output, tuple):  # an actor-critic's logits or Gaussian policy, and its values
            output = output[0]
        if isinstance(space, Discrete):
            return output.argmax(1).numpy()
        return output.mean.numpy().clip(space.low, space.high)

    return act


def picture(envs, screen):
    """What the first environment shows, as bytes (height, width, 3). On Atari, it is on screen."""
    if screen is not None:
        frame = screen[0, 0]
    else:
        env = envs.unwrapped.envs[0]
        env.unwrapped.render_mode = "rgb_array"
        frame = env.render()
    if frame.dtype != np.uint8:  # MinAtar's colours are from 0 to 1, and dark on black
        frame = (255 * frame**0.5).astype(np.uint8)
    scale = max(1, HEIGHT // len(frame))
    return frame.repeat(scale, 0).repeat(scale, 1)


def play(envs, act, args, film=None, filmed=None) -> list[float]:
    """The scores of whole games of all environments. --video's pictures are added to film."""
    num_envs = envs.num_envs
    planned = [len(range(i, args.episodes, num_envs)) for i in range(num_envs)]
    scores = []
    observations, _ = envs.reset(seed=1)
    screen = filmed.reset(seed=1)[0] if filmed else None
    frames_left = 0 if film is None else LONGEST
    with tqdm(total=args.episodes, unit="game") as bar:
        while len(scores) < args.episodes:
            if frames_left > 0:
                film.append(picture(envs, screen))
                frames_left -= 1
            actions = act(observations)
            observations, _, _, _, info = envs.step(actions)
            if filmed:
                screen = filmed.step(actions[:1])[0]
            if "episode" not in info:
                continue
            for i in np.flatnonzero(info["_episode"]):  # whole games, not lives
                if planned[i] > 0:
                    planned[i] -= 1
                    scores.append(float(info["episode"]["r"][i]))
                    bar.update()
            if info["_episode"][0]:
                frames_left = 0
    return scores


def main(args):
    if args.episodes < 1 or (args.video and args.video.suffix != ".gif"):
        raise ValueError("--episodes must be at least 1, and --video end in .gif")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
    envs, act, filmed = load_run(args)
    film = [] if args.video else None
    scores = np.array(play(envs, act, args, film, filmed))
    games = "1 game" if len(scores) == 1 else f"{len(scores)} games"
    text = f"{games}: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}"
    print(f"{text}, min {scores.min():g}, max {scores.max():g}")
    if args.video:
        first, *others = map(Image.fromarray, film)
        look = {"duration": 1000 / STEPS_PER_SECOND, "loop": 0}
        first.save(args.video, save_all=True, append_images=others, **look)
        print(args.video)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (OSError, ValueError, ImportError, gymnasium.error.Error) as error:  # no run, no game
        sys.exit(f"watch.py: {error}")
