"""Play with a trained agent: its score over a number of episodes, and a video of one of them.

    python tools/watch.py runs/<run>                                30 episodes of the most likely actions
    python tools/watch.py runs/<run> --epsilon 0.01 --sticky        with noise that was not there in training
    python tools/watch.py runs/<run> --episodes 1 --video game.mp4  one episode, to look at

Network, environments and precision are those of the script that wrote the checkpoint; where the run had
--episodic-life, FIRE is pressed after a lost life, as in training. Scores are of whole games and not clipped. How many
episodes each of the parallel environments plays is fixed beforehand: to take those that end first would favour short
ones. Without sticky actions, greedy games differ only in the number of no-ops at their start: there are at most 30
different ones, and more episodes than that repeat them.

The video shows the first environment's first episode: a second emulator with the same seed gets the same actions, and
gives its picture in colour and full size. Like what the agent sees, it is the maximum of two frames.
"""

import importlib
import os
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import ale_py
import gymnasium
import imageio.v2 as imageio
import numpy as np
import torch
import tyro
from ale_py.vector_env import AtariVectorEnv
from PIL import Image, ImageDraw, ImageFont
from scipy.stats import bootstrap
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools import scores

SCRIPTS = "pqn_abs.py pqn_abs_xl.py gns_baseline.py ppo_abs.py p3o_abs.py".split()
STEPS_PER_SECOND = 15  # as the console plays: 60 frames a second, 4 a step
SIZE, SCREEN = (576, 432), (320, 420)  # of the video, multiples of 16, and of the game within, in pixels
PAPER, INK, GREY, CHOSEN = "#ffffff", "#222222", "#b0b0b0", "#d1495b"


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[Path]  # a run's checkpoint.pt, or its folder
    episodes: int = 30  # whole games
    num_envs: int = 10  # environments that play them in parallel
    epsilon: float = 0.0  # share of random actions
    sample: bool = False  # ppo_abs.py and p3o_abs.py: draw actions from the policy instead of taking the most likely
    sticky: bool = False  # repeat the last action with probability 0.25, as ALE/...-v5 does, whatever the run did
    max_steps: int = 27_000  # an episode is cut after these; the default is half an hour of play, as is usual
    seed: int = 1  # of environments and actions
    device: str = "auto"  # auto (CUDA where there is one), cpu, cuda or cuda:N
    video: Path | None = None  # .mp4 or .gif, of the first environment's first episode
    video_seconds: float = 60.0  # length at which the video is cut; it plays at the console's speed


class Episode(NamedTuple):
    score: float
    steps: int
    cut: bool  # at the limit
    idle: int  # steps since the last point


class Moment(NamedTuple):
    """A picture of the video: the screen, what the network says of it, the action it led to, and the score so far."""

    screen: np.ndarray
    values: list[float]
    action: int
    score: float


def fail(message: str):
    print(f"watch.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(args: Args) -> None:
    rules = [(name, getattr(args, name) >= 1, "at least 1") for name in ("episodes", "num_envs", "max_steps")]
    rules += [("epsilon", 0 <= args.epsilon <= 1, "between 0 and 1"), ("seed", args.seed >= 0, "at least 0")]
    rules += [("video_seconds", 1 <= args.video_seconds <= 3600, "from 1 to 3600")]
    for name, fine, need in rules:
        if not fine:
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {need}")
    if args.video and args.video.suffix not in (".mp4", ".gif"):
        fail(f"--video {args.video}: it must end in .mp4 or .gif")
    if args.video and (args.video.is_dir() or not os.access(args.video.parent, os.W_OK)):
        fail(f"--video {args.video}: no file can be written there")


def read_checkpoint(path: Path) -> tuple[ModuleType, dict]:
    """The script that wrote it, imported, and the checkpoint. Says what load_checkpoint would say of --resume."""
    path = path / "checkpoint.pt" if path.is_dir() else path
    try:
        with warnings.catch_warnings(action="ignore"):  # a foreign file gets our one line, not torch's as well
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            name, flags = checkpoint["script"], checkpoint["args"].keys()
    except FileNotFoundError:
        fail(f"{path}: there is no such file")
    except Exception:  # torch.load has about ten ways to say it of torn and foreign files
        fail(f"{path}: this is no run's checkpoint.pt, or not a whole one")
    if name not in SCRIPTS:
        fail(f"{path}: this checkpoint is from {name}, not from {', '.join(SCRIPTS)}")
    script = importlib.import_module(name.removesuffix(".py"))
    if flags != asdict(script.Args()).keys():
        fail(f"{path}: this checkpoint is from a version of {name} that has other options")
    gymnasium.register_envs(ale_py)
    game = gymnasium.registry.get(checkpoint["args"]["env_id"])
    if game is None or game.entry_point != "ale_py.env:AtariEnv":
        fail(f"{path}: the run's environment is {checkpoint['args']['env_id']}, but watch.py knows only Atari games")
    return script, checkpoint


def make_network(script: ModuleType, envs, args) -> torch.nn.Module:
    if hasattr(script, "ActorCritic"):
        return script.ActorCritic(envs)
    if hasattr(script, "SIZES"):  # pqn_abs_xl.py
        width, num_blocks = script.SIZES[args.size]
        return script.QNetwork(envs, args.channels, args.width or width, args.num_blocks or num_blocks)
    return script.QNetwork(envs)


def make_envs(script: ModuleType, args, **changes):
    """The script's environments, with some of their options changed."""
    with patch.object(script, "AtariVectorEnv", lambda *game, **options: AtariVectorEnv(*game, **options | changes)):
        return script.make_envs(args)


def play(envs, evaluate, args: Args, press_fire: bool, screen=None) -> tuple[list[Episode], list[Moment]]:
    """Episodes of all environments, and the first one's moments, of a screen that is its twin.

    evaluate(frames) gives (E, A) Q-values or probabilities; press_fire: whether FIRE follows a lost life.
    """
    num_envs, share = envs.num_envs, [len(range(i, args.episodes, envs.num_envs)) for i in range(envs.num_envs)]
    torch.manual_seed(args.seed)
    seeds = (np.random.SeedSequence(args.seed).generate_state(num_envs) >> 1).astype(np.int64)  # below 2^31
    frames, info = envs.reset(seed=seeds)
    if screen:
        pictures, _ = screen.reset(seed=seeds[:1])
    lives, lost_life = info["lives"], np.zeros(num_envs, dtype=bool)
    score, steps, idle = np.zeros((3, num_envs))
    episodes, moments = [[] for _ in range(num_envs)], []
    progress = tqdm(total=args.episodes, unit="episode")
    while any(len(own) < planned for own, planned in zip(episodes, share, strict=True)):
        values = evaluate(frames)
        actions = torch.multinomial(values, 1).squeeze(1) if args.sample else values.argmax(-1)
        explore = torch.rand(num_envs) < args.epsilon
        actions = torch.where(explore, torch.randint(values.shape[1], (num_envs,)), actions).numpy()
        if press_fire:
            actions[lost_life] = envs.fire_action
        if screen:
            moments.append(Moment(pictures[0, -1], values[0].tolist(), int(actions[0]), score[0]))
            pictures, *_, last = screen.step(actions[:1])
        frames, reward, terminated, truncated, info = envs.step(actions)
        done = terminated | truncated
        lost_life = (info["lives"] < lives) & ~done  # where done, lives are the next episode's
        lives = info["lives"]
        score += reward
        steps += 1
        idle = np.where(reward == 0, idle + 1, 0)
        if screen and done[0]:
            moments.append(Moment(last["final_obs"][0, -1], *moments[-1][1:3], score[0]))
        if screen and (done[0] or len(moments) >= args.video_seconds * STEPS_PER_SECOND):
            screen = None
        for i in np.flatnonzero(done):
            if len(episodes[i]) < share[i]:
                episodes[i].append(Episode(score[i], int(steps[i]), bool(truncated[i]), int(idle[i])))
                progress.update()
            score[i] = steps[i] = idle[i] = 0
    progress.close()
    return [episode for own in episodes for episode in own], moments


def summary(episodes: list[Episode], env_id: str, args: Args) -> str:
    points = np.array([episode.score for episode in episodes])
    mean, lines = points.mean(), []
    line = f"mean {mean:,.2f}"
    if len(points) > 1:
        # percentiles: unlike the default method they exist where all scores are equal
        interval = bootstrap((points,), np.mean, method="percentile", rng=args.seed).confidence_interval
        line += f", 95% bootstrap interval {interval.low:,.2f} to {interval.high:,.2f}"
    lines.append(line)
    lines.append(f"median {np.median(points):,.2f}, lowest {points.min():,.0f}, highest {points.max():,.0f}")
    if reference := scores.reference_scores().get(scores.game_name(env_id)):
        random, human = reference
        normalised = (mean - random) / (human - random)
        lines.append(f"human-normalised mean {normalised:.3f} (0 is random play, {random:,}, and 1 a human, {human:,})")
    if (kinds := len(set(episodes))) < len(episodes):
        lines.append(f"{kinds} different games among {len(episodes)}, by score and length: noise makes more of them")
    if cut := [episode for episode in episodes if episode.cut]:
        still = sum(episode.idle > args.max_steps / 2 for episode in cut)
        line = f"{len(cut)} of {len(episodes)} episodes were cut at {args.max_steps:,} steps"
        if still:
            line += f", {still} of them with no point in their second half (a game that waits for FIRE stands still for"
            line += " a policy that never fires; --epsilon 0.01 gets it going)"
        lines.append(line)
    return "\n".join(lines)


def draw(moment: Moment, title: str, heading: str, buttons: list[str]) -> Image.Image:
    """The screen on the left, and on the right the score and a bar for each action, red for the one that was taken."""
    image = Image.new("RGB", SIZE, PAPER)
    image.paste(Image.fromarray(moment.screen).resize(SCREEN, Image.Resampling.NEAREST), (6, 6))
    pen, small, large = ImageDraw.Draw(image), ImageFont.load_default(12), ImageFont.load_default(20)
    left = SCREEN[0] + 20
    pen.text((left, 8), title, INK, small)
    pen.text((left, 26), f"score {moment.score:,.0f}", INK, large)
    pen.text((left, 62), heading, INK, small)
    values = np.array(moment.values)
    if heading == "Q-values":  # they differ by little: the bars go from the lowest to the highest
        bars = (values - values.min()) / (np.ptp(values) or 1)
    else:
        bars = values
    for i, (button, value, bar) in enumerate(zip(buttons, values, bars, strict=True)):
        top = 84 + 18 * i
        colour = CHOSEN if i == moment.action else GREY
        pen.text((left, top), button.lower(), INK, small)
        pen.rectangle((left + 92, top + 3, left + 93 + round(72 * float(bar)), top + 12), colour)
        pen.text((SIZE[0] - 8, top), f"{value:.2f}", INK, small, anchor="ra")
    return image


def write_video(pictures: list[Image.Image], path: Path) -> None:
    """All or nothing: an earlier file stays until the new one is whole."""
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    if path.suffix == ".gif":
        options = {"duration": 70, "loop": 0}  # ms; a GIF counts in hundredths of a second
    else:
        options = {"fps": STEPS_PER_SECOND}
    with imageio.get_writer(part, **options) as writer:
        for picture in pictures:
            writer.append_data(np.asarray(picture))
    os.replace(part, path)


def main(args: Args) -> None:
    check(args)
    script, checkpoint = read_checkpoint(args.checkpoint)
    policy = hasattr(script, "ActorCritic")
    if args.sample and not policy:
        fail(f"--sample: {checkpoint['script']} has no policy to draw from; --epsilon makes random actions")
    run = replace(script.Args(**checkpoint["args"]), num_envs=min(args.num_envs, args.episodes), device=args.device)
    device, dtype = script.pick_device(run)
    changes = {"max_num_frames_per_episode": 4 * args.max_steps}
    changes |= {"repeat_action_probability": 0.25} if args.sticky else {}
    envs = make_envs(script, run, **changes)
    network = make_network(script, envs, run)
    try:
        network.load_state_dict(checkpoint["network"])
    except (RuntimeError, TypeError, KeyError):
        fail(f"{args.checkpoint}: its network is not that of {checkpoint['script']}")
    network.to(device)

    @torch.inference_mode()
    def evaluate(frames):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = network(torch.from_numpy(frames).to(device))
        return (output[0].softmax(-1) if policy else output).cpu()

    how = "actions drawn from the policy" if args.sample else "greedy actions"
    how += f", ε = {args.epsilon:g}" if args.epsilon else ""
    sticky = args.sticky or gymnasium.spec(run.env_id).kwargs["repeat_action_probability"] > 0
    print(f"{checkpoint['script']} on {run.env_id} after {checkpoint['global_step']:,} steps of training")
    print(f"{args.episodes} episodes with {how}; {'sticky' if sticky else 'no sticky'} actions")
    screen = None
    if args.video:
        colour = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
        screen = make_envs(script, replace(run, num_envs=1), **changes, **colour)
    episodes, moments = play(envs, evaluate, args, run.episodic_life, screen)
    print(summary(episodes, run.env_id, args))
    if args.video:
        title = f"{scores.game_name(run.env_id)}, {checkpoint['script']}"
        buttons = [button.name for button in envs.ale.get_action_set()]
        heading = "action probabilities" if policy else "Q-values"
        pictures = (draw(moment, title, heading, buttons) for moment in moments)
        write_video(pictures, args.video)
        print(f"{len(moments) / STEPS_PER_SECOND:.0f} s of video: {args.video}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        print("watch.py: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
