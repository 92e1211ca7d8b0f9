"""Play with a trained agent: the scores of whole games, and a video of one of them.

    python tools/watch.py runs/<run> --episodes 100             scores of 100 games, greedy actions
    python tools/watch.py runs/<run> --episodes 1 --video game.gif

Game and network are those of the script that made the run, any of this repository but
p3o_tokens.py. Weights stay as they are, scores are not clipped. Where the run had --episodic-life,
games are whole all the same, and FIRE follows a lost life as in training. How many games each of
the parallel environments plays is fixed beforehand: the first to end would be the short ones.

The video shows the first environment's first game, up to a minute of it, Atari as the agent sees
it; which agent, is in the .txt beside it. On Linux without a screen, MuJoCo draws with
MUJOCO_GL=egl; where that fails, set MUJOCO_GL=osmesa.
"""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
import tyro
from ale_py.vector_env import AtariVectorEnv

ROOT = Path(__file__).resolve().parents[1]
STEPS_PER_SECOND = 15  # of a video, as the console plays: 60 frames a second, 4 a step
LONGEST = 60 * STEPS_PER_SECOND  # steps of a video
HEIGHT = 420  # pixels of a video; a MinAtar game has 10


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # its folder
    episodes: int = 30  # whole games
    video: Path | None = None  # a .gif


def load_script(name):
    """The module that trains, with the parts that the script of this name puts into it."""
    for folder in (ROOT, ROOT / "examples", *ROOT.glob("results/*")):
        if Path(name).name == name and (folder / name).is_file():
            sys.path[:0] = [str(folder), str(ROOT)]
            module = importlib.import_module(Path(name).stem)
            for original in ("pqn_abs", "ppo_abs_continuous"):
                module = getattr(module, original, module)
            return module
    raise ValueError(f"there is no {name} in {ROOT.name}, examples or results")


def load_run(args):
    """Its environments, what acts in them, whether FIRE follows a lost life, and which agent."""
    name = json.loads((args.run / "config.json").read_text())["script"]
    script = load_script(name)
    checkpoint = torch.load(args.run / "checkpoint.pt", map_location="cpu", weights_only=True)
    run = script.Args(**checkpoint["args"])
    agent = {"script": name, "env_id": run.env_id, "seed": run.seed}
    agent |= {"global_step": checkpoint["global_step"], "adapt_rollout": run.adapt_rollout}
    run.num_envs = min(10, args.episodes)  # that play in parallel
    fire = getattr(run, "episodic_life", False)
    run.episodic_life = False  # whole games
    envs = script.make_envs(run)
    make_network = getattr(script, "ActorCritic", None) or script.QNetwork
    sizes = [run.size] if hasattr(run, "size") else []  # pqn_abs_xl.py
    network = make_network(envs, *sizes)
    network.load_state_dict(checkpoint["network"])
    return envs, make_actor(script, run, checkpoint, envs, network), fire, agent


def make_actor(script, run, checkpoint, envs, network):
    """act(observations): (E, ...) -> greedy actions (E,), or a Gaussian policy's means (E, A)."""
    space = envs.single_action_space
    normalizer = None
    if "observations" in checkpoint:  # ppo_abs_continuous.py scales by moments, frozen here
        normalizer = script.Normalizer(envs, run.gamma)
        normalizer.observations.load_state_dict(checkpoint["observations"])

    def act(observations):
        if normalizer:
            means, _ = network(torch.from_numpy(normalizer.scale(observations)))
            return means.numpy().clip(space.low, space.high)
        outputs = network(torch.from_numpy(observations))
        scores = outputs[0] if isinstance(outputs, tuple) else outputs  # logits, or Q-values
        return scores.argmax(-1).numpy()

    return act


def picture(envs, observations):
    """What the first environment shows, as bytes (height, width) or (height, width, 3)."""
    if isinstance(envs, AtariVectorEnv):
        frame = observations[0, -1]
    else:
        envs.envs[0].unwrapped.render_mode = "rgb_array"
        frame = envs.envs[0].render()
    if frame.dtype != np.uint8:  # MinAtar's colours are from 0 to 1
        frame = (255 * frame).astype(np.uint8)
    scale = max(1, HEIGHT // len(frame))
    return frame.repeat(scale, 0).repeat(scale, 1)


@torch.no_grad()
def play(envs, act, args, fire=False, video=None) -> list[float]:
    """The scores of whole games of all environments."""
    num_envs = envs.num_envs
    planned = [len(range(i, args.episodes, num_envs)) for i in range(num_envs)]
    scores = []
    observations, info = envs.reset(seed=1)
    lives = info.get("lives")
    lost_life = np.zeros(num_envs, bool)
    score = np.zeros(num_envs)
    frames_left = LONGEST if video else 0
    while len(scores) < args.episodes:
        if frames_left > 0:
            video.append_data(picture(envs, observations))
            frames_left -= 1
        actions = act(observations)
        if fire:
            actions[lost_life] = envs.fire_action
        observations, reward, terminated, truncated, info = envs.step(actions)
        score += reward
        ended = terminated | truncated
        if lives is not None:
            lost_life = (info["lives"] < lives) & ~ended
            lives = info["lives"]
        for i in np.flatnonzero(ended):
            if planned[i] > 0:
                planned[i] -= 1
                scores.append(float(score[i]))
        if ended[0]:
            frames_left = 0
        score[ended] = 0
    return scores


def main(args):
    if args.episodes < 1 or (args.video and args.video.suffix != ".gif"):
        raise ValueError("--episodes must be at least 1, and --video end in .gif")
    if args.video and sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
    envs, act, fire, agent = load_run(args)
    print(json.dumps(agent))
    video = None
    if args.video:
        args.video.with_suffix(".txt").write_text(json.dumps(agent) + "\n")
        video = imageio.get_writer(args.video, duration=1000 / STEPS_PER_SECOND, loop=0)
    scores = np.array(play(envs, act, args, fire, video))
    if video:
        video.close()
    text = f"{len(scores)} games: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}"
    print(f"{text}, min {scores.min():g}, max {scores.max():g}")


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    try:
        main(args)
    except Exception as error:  # torn, foreign and wrong files have about ten ways to show it
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(f"watch.py: {args.run}: {text}", file=sys.stderr)
        raise SystemExit(2) from None
