"""The tool plays as the script that trained would, counts the right episodes, and shows what was played."""

import re
from dataclasses import asdict

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from helpers import ROOT, SmallEnvs, load, same, start
from PIL import Image

from tools import scores, watch

SIZES = {"channels": (4, 8, 8), "width": 16, "num_blocks": 1}  # of pqn_abs_xl.py, other than its defaults
TINY = {"num_envs": 2, "max_steps": 60, "device": "cpu"}


def write_checkpoint(path, name="ppo_abs.py", env_id="BreakoutNoFrameskip-v4", **options):
    """An untrained network, as the script would save it at its start; returns the path, the script and the network."""
    script = watch.importlib.import_module(name.removesuffix(".py"))
    sizes = SIZES if name == "pqn_abs_xl.py" else {}
    args = script.Args(env_id=env_id, num_envs=1, precision="float32", **sizes, **options)
    torch.manual_seed(3)
    network = getattr(script, "ActorCritic", None) or script.QNetwork
    network = network(script.make_envs(args), *sizes.values())
    state = {"script": name, "args": asdict(args), "network": network.state_dict(), "global_step": 0}
    torch.save(state, path)
    return path, script, network


@pytest.fixture
def emulators(monkeypatch):
    """Every vector environment that is made, with what went through it."""
    made = []

    class Recorded(watch.AtariVectorEnv):
        def __init__(self, game, num_envs, **options):
            super().__init__(game, num_envs, **options)
            self.options, self.steps = options, []
            made.append(self)

        def reset(self, **options):
            self.now, info = super().reset(**options)
            return self.now, info

        def step(self, actions):
            frames, self.now = self.now.copy(), None
            self.now, *rest = super().step(actions)
            self.steps.append((frames, actions.copy(), *rest[:3], rest[3]["lives"].copy()))
            return self.now, *rest

    monkeypatch.setattr(watch, "AtariVectorEnv", Recorded)
    return made


# --- Scores ---


def test_reference_scores_are_of_57_games_that_gymnasium_has():
    table = scores.reference_scores()
    gymnasium.register_envs(watch.importlib.import_module("ale_py"))
    assert len(table) == 57 and all(f"ALE/{game}-v5" in gymnasium.registry for game in table)
    assert all(random < human for random, human in table.values())
    assert table["Breakout"] == (1.7, 30.5) and table["Pong"] == (-20.7, 14.6)


@pytest.mark.parametrize(
    "env_id", ["BreakoutNoFrameskip-v4", "BreakoutNoFrameskip-v0", "Breakout-v4", "ALE/Breakout-v5"]
)
def test_game_name(env_id):
    assert scores.game_name(env_id) == "Breakout"


def episodes_of(*points, **rest):
    return [watch.Episode(score, 10, rest.get("cut", False), rest.get("idle", 0)) for score in points]


def test_summary_of_known_scores():
    points = [0.0, 2.0, 4.0, 10.0] * 25
    text = watch.summary(episodes_of(*points), "ALE/Breakout-v5", watch.Args("x"))
    mean, low, high, median, lowest, highest = map(float, re.findall(r"-?\d+\.?\d*", text.replace("95%", ""))[:6])
    assert (mean, median, lowest, highest) == (4, 3, 0, 10)
    error = np.std(points) / np.sqrt(len(points))  # of the mean
    assert low == pytest.approx(4 - 1.96 * error, abs=0.1) and high == pytest.approx(4 + 1.96 * error, abs=0.1)
    assert f"human-normalised mean {(4 - 1.7) / (30.5 - 1.7):.3f}" in text
    assert "cut" not in text


def test_summary_where_something_is_missing():
    args = watch.Args("x", max_steps=1000)
    assert "interval" not in watch.summary(episodes_of(3.0), "ALE/Breakout-v5", args)
    assert "3.00 to 3.00" in watch.summary(episodes_of(3.0, 3.0), "ALE/Breakout-v5", args)
    assert "\n1 different games among 2" in watch.summary(episodes_of(3.0, 3.0), "ALE/Breakout-v5", args)
    assert "different" not in watch.summary(episodes_of(3.0, 4.0), "ALE/Breakout-v5", args)
    assert "human" not in watch.summary(episodes_of(1.0, 2.0), "ALE/Adventure-v5", args)
    cut = episodes_of(1.0, 2.0) + episodes_of(0.0, cut=True, idle=900) + episodes_of(0.0, cut=True, idle=20)
    text = watch.summary(cut, "ALE/Breakout-v5", args)
    assert "2 of 4 episodes were cut at 1,000 steps, 1 of them with no point in their second half" in text
    lively = watch.summary(episodes_of(0.0, 1.0, cut=True, idle=20), "ALE/Breakout-v5", args)
    assert lively.endswith("2 of 2 episodes were cut at 1,000 steps")


# --- Playing ---


class Clockwork(SmallEnvs):
    """Environment i's episodes take i + 1 steps and score 10 i + 1, 10 i + 2, ...: the short ones end first."""

    def reset(self, *, seed=None):
        self.seed, self.clock = seed, np.zeros(self.num_envs, dtype=int)
        return np.zeros((self.num_envs, 6), np.uint8), {"lives": np.ones(self.num_envs, dtype=int)}

    def step(self, actions):
        self.clock += 1
        period = np.arange(self.num_envs) + 1
        done = self.clock % period == 0
        reward = np.where(done, 10 * (period - 1) + self.clock // period, 0)
        info = {"lives": np.ones(self.num_envs, dtype=int)}
        return np.zeros((self.num_envs, 6), np.uint8), reward, done, np.zeros(self.num_envs, dtype=bool), info


def test_each_environment_plays_its_share_whatever_ends_first():
    envs = Clockwork(3)
    episodes, _ = watch.play(envs, lambda frames: torch.ones(3, 4), watch.Args("x", episodes=7), press_fire=False)
    assert [episode.score for episode in episodes] == [1, 2, 3, 11, 12, 21, 22]
    assert [episode.steps for episode in episodes] == [1, 1, 1, 2, 2, 3, 3]
    assert len(set(envs.seed.tolist())) == 3
    seeds = set(envs.seed.tolist())
    watch.play(envs, lambda frames: torch.ones(3, 4), watch.Args("x", episodes=3, seed=2), press_fire=False)
    assert not seeds & set(envs.seed.tolist())


class Known(SmallEnvs):
    """Episodes of 100 steps, cut there, with a point at step 30 and a life lost at 40; each starts with fewer lives."""

    def reset(self, *, seed=None):
        self.steps, self.taken = 0, []
        return np.zeros((1, 6), np.uint8), {"lives": np.array([9])}

    def step(self, actions):
        self.steps += 1
        self.taken += actions.tolist()
        episode, step = divmod(self.steps, 100)
        frames, no = np.zeros((1, 6), np.uint8), np.zeros(1, dtype=bool)
        info = {"lives": np.array([9 - 3 * episode - (step >= 40)]), "final_obs": frames}
        return frames, np.array([float(step == 30)]), no, np.array([step == 0]), info


@pytest.mark.parametrize("press_fire", [True, False])
def test_an_episode_of_known_course(press_fire):
    envs, args = Known(1), watch.Args("x", episodes=2, video_seconds=2)
    episodes, moments = watch.play(envs, lambda frames: torch.eye(4)[:1], args, press_fire, Known(1))
    assert episodes == [watch.Episode(score=1, steps=100, cut=True, idle=70)] * 2
    fired = np.flatnonzero(np.array(envs.taken) == envs.fire_action).tolist()
    assert fired == ([40, 140] if press_fire else [])
    assert len(moments) == 2 * 15


@pytest.mark.parametrize("name", watch.SCRIPTS)
def test_actions_are_those_of_the_saved_network(tmp_path, emulators, monkeypatch, capsys, name):
    """Greedy, and the same each time."""
    networks, make_network = [], watch.make_network
    monkeypatch.setattr(watch, "make_network", lambda *all: networks.append(make_network(*all)) or networks[-1])
    path, script, network = write_checkpoint(tmp_path / "checkpoint.pt", name, episodic_life=False)
    outputs = []
    for _ in range(2):
        watch.main(watch.Args(path, episodes=2, **TINY))
        outputs.append(capsys.readouterr().out.partition("training")[2])
    assert outputs[0] == outputs[1] != ""
    assert all(same(loaded.state_dict(), network.state_dict()) for loaded in networks)
    envs = emulators[0]
    assert len(envs.steps) == 60
    for frames, actions, *_ in envs.steps:
        with torch.no_grad():
            output = network(torch.from_numpy(frames))
        assert actions.tolist() == (output[0] if hasattr(script, "ActorCritic") else output).argmax(-1).tolist()
    assert envs.options["repeat_action_probability"] == 0 and envs.options["max_num_frames_per_episode"] == 240
    assert not envs.options["reward_clipping"] and envs.num_envs == 2


def test_drawn_actions_follow_the_probabilities(tmp_path, emulators):
    probabilities = torch.tensor([[0.6, 0.3, 0.1, 0.0]])
    drawn = {}
    for name, options in {"sample": {"sample": True}, "epsilon": {"epsilon": 0.4}, "greedy": {}}.items():
        seen = []
        envs = Clockwork(1)
        step = envs.step
        envs.step = lambda actions, step=step, seen=seen: (seen.extend(actions.tolist()), step(actions))[1]
        watch.play(envs, lambda frames: probabilities, watch.Args("x", episodes=4000, **options), press_fire=False)
        drawn[name] = np.bincount(seen, minlength=4) / len(seen)
    assert drawn["sample"] == pytest.approx([0.6, 0.3, 0.1, 0.0], abs=0.03) and drawn["sample"][3] == 0
    assert drawn["epsilon"] == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.03)
    assert drawn["greedy"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("episodic_life", [True, False])
def test_fire_follows_a_lost_life_as_in_training(tmp_path, emulators, episodic_life):
    path, *_ = write_checkpoint(tmp_path / "checkpoint.pt", episodic_life=episodic_life)
    watch.main(watch.Args(path, episodes=4, epsilon=1.0, num_envs=4, max_steps=200, device="cpu"))
    (envs,) = emulators
    pairs = zip(envs.steps, envs.steps[1:], envs.steps[2:], strict=False)
    fired = []
    for (*_, before), (_, _, _, terminated, truncated, lives), (_, following, *_) in pairs:
        fired += (following == envs.fire_action)[(lives < before) & ~terminated & ~truncated].tolist()
    assert len(fired) > 5 and all(fired) == episodic_life


def test_sticky_actions_and_the_cut_are_asked_of_the_emulator(tmp_path, emulators, capsys):
    path, *_ = write_checkpoint(tmp_path / "checkpoint.pt", "pqn_abs.py", episodic_life=False)
    watch.main(watch.Args(path, episodes=3, sticky=True, **TINY))
    (envs,) = emulators
    assert envs.options["repeat_action_probability"] == 0.25
    output = capsys.readouterr().out
    assert "3 episodes with greedy actions; sticky actions" in output
    assert "3 of 3 episodes were cut at 60 steps" in output
    assert len(envs.steps) == 120


# --- The video ---


def test_the_screen_is_the_first_environments_game(tmp_path, emulators, monkeypatch):
    """In colour and full size, but the same game, down to its last frame: made small and grey it is what was seen."""
    played, play = [], watch.play
    monkeypatch.setattr(watch, "play", lambda *all: played.append(play(*all)) or played[0])
    path, *_ = write_checkpoint(tmp_path / "checkpoint.pt", env_id="SpaceInvadersNoFrameskip-v4")
    video = tmp_path / "game.gif"
    options = {"epsilon": 0.9, "sticky": True, "max_steps": 120, "video": video}
    watch.main(watch.Args(path, episodes=3, num_envs=2, **options))
    envs, screen = emulators
    ((episodes, moments),) = played
    assert len(screen.steps) == episodes[0].steps == 120 < len(envs.steps)
    assert len(moments) == episodes[0].steps + 1
    for moment, ours, twins in zip(moments, envs.steps, screen.steps, strict=False):
        assert moment.action == twins[1][0] == ours[1][0]
        assert [float(part[0]) for part in twins[2:]] == [float(part[0]) for part in ours[2:]]
    small = [Image.fromarray(moment.screen).convert("L").resize((84, 84), Image.Resampling.BOX) for moment in moments]
    seen = [frames[0, -1] for frames, *_ in envs.steps[: len(screen.steps)]]
    changes = zip(np.diff(np.array(small, float), axis=0), np.diff(np.array(seen, float), axis=0), strict=False)
    alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in changes if a.any() and b.any()]
    assert len(alike) > 80 and min(alike) > 0.6  # what moves, moves alike; the background would always agree
    assert [moment.score for moment in moments[1:]] == np.cumsum([step[2][0] for step in screen.steps]).tolist()
    assert moments[-1].score == episodes[0].score > 0
    assert len({moment.screen.tobytes() for moment in moments}) > 80


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_video_can_be_read_back(tmp_path, kind):
    noise = np.random.default_rng(0).integers(256, size=(30, 1, 1, 3), dtype=np.uint8)  # a colour each
    screens = np.broadcast_to(noise, (30, 210, 160, 3))
    moments = [watch.Moment(screen, [0.1, 0.9], 1, 7.0) for screen in screens]
    video = tmp_path / f"game.{kind}"
    video.write_text("an earlier one")
    watch.write_video([watch.draw(moment, "Game", "Q-values", ["NOOP", "FIRE"]) for moment in moments], video)
    assert sorted(tmp_path.iterdir()) == [video]
    pictures = imageio.mimread(video, memtest=False)
    assert len(pictures) == 30 and pictures[0].shape[:2] == (432, 576)
    for picture, screen in zip(pictures, screens, strict=True):
        assert np.abs(picture[200, 160, :3].astype(float) - screen[0, 0]).max() < 12


def test_bars_show_the_values():
    def width(heading, values, action):
        moment = watch.Moment(np.zeros((210, 160, 3), np.uint8), values, action, 0.0)
        pixels = np.asarray(watch.draw(moment, "", heading, ["A", "B", "C"]))
        colours = [tuple(bytes.fromhex(colour[1:])) for colour in (watch.GREY, watch.CHOSEN)]
        rows = [pixels[84 + 18 * i + 8] for i in range(3)]
        return [[int((row == colour).all(-1).sum()) for colour in colours] for row in rows]

    grey_and_red = width("action probabilities", [0.5, 0.25, 0.25], 0)
    assert grey_and_red == [[0, 38], [20, 0], [20, 0]]
    assert width("Q-values", [5.0, 5.1, 5.2], 1) == [[2, 0], [0, 38], [74, 0]]
    assert width("Q-values", [5.0, 5.0, 5.0], 1) == [[2, 0], [0, 2], [2, 0]]


# --- The command line, and what it refuses ---


def test_a_real_run_from_the_command_line(tmp_path):
    tiny = "--num-envs 2 --total-timesteps 100 --num-minibatches 2 --num-steps 64".split()
    process = start(ROOT / "ppo_abs.py", *tiny, "--runs-dir", tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (folder,) = tmp_path.iterdir()
    options = ["--episodes", 2, "--max-steps", 30, "--video", folder / "game.gif"]
    process = start(ROOT / "tools" / "watch.py", folder, *options)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"ppo_abs.py on BreakoutNoFrameskip-v4 after {load(folder)['global_step']} steps of training\n" in output
    assert "2 episodes with greedy actions; no sticky actions\n" in output and "\nhuman-normalised mean " in output
    assert imageio.imread(folder / "game.gif").shape[:2] == (432, 576)


def refuses(args, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        watch.main(args)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and error.endswith("\n")
    return error


@pytest.mark.parametrize(
    "options, says",
    [
        ({"episodes": 0}, "--episodes 0"),
        ({"num_envs": 0}, "--num-envs 0"),
        ({"max_steps": 0}, "--max-steps 0"),
        ({"epsilon": 1.5}, "--epsilon 1.5"),
        ({"epsilon": float("nan")}, "--epsilon nan"),
        ({"seed": -1}, "--seed -1"),
        ({"video_seconds": 0.0}, "--video-seconds 0"),
        ({"device": "gpu"}, "--device gpu"),
        ({"sample": True}, "no policy"),
        ({"video": "film.avi"}, ".mp4 or .gif"),
        ({"video": "nowhere/film.mp4"}, "no file can be written"),
        ({"video": "folder.gif"}, "no file can be written"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, monkeypatch, options, says):
    path, *_ = write_checkpoint(tmp_path / "checkpoint.pt", "pqn_abs.py")
    (tmp_path / "folder.gif").mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(watch, "play", lambda *all: pytest.fail("it must not start"))
    if "video" in options:
        options = {"video": tmp_path / options["video"]}
    capsys.readouterr()
    assert says in refuses(watch.Args(path, **options), capsys)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "change, says",
    [
        ({"script": "old_pqn.py"}, "from old_pqn.py"),
        ({"script": ["ppo_abs.py"]}, "is from"),
        ({"args": {"env_id": "ALE/Pong-v5"}}, "other options"),
        ({"args": None}, "no run's checkpoint.pt"),
        ({"env_id": "breakout"}, "breakout, but watch.py knows only Atari"),
        ({"env_id": "CartPole-v1"}, "only Atari"),
        ({"network": {}}, "its network is not that of ppo_abs.py"),
        ({"network": None}, "its network is not that of ppo_abs.py"),
    ],
)
def test_foreign_checkpoints_are_refused(tmp_path, capsys, change, says):
    path, *_ = write_checkpoint(tmp_path / "checkpoint.pt")
    saved = torch.load(path)
    saved["args"] |= {key: value for key, value in change.items() if key == "env_id"}
    torch.save(saved | {key: value for key, value in change.items() if key != "env_id"}, path)
    capsys.readouterr()
    assert says in refuses(watch.Args(path, num_envs=1), capsys)


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    path, *_ = write_checkpoint(tmp_path / "checkpoint.pt")
    torn, foreign, tensor = (tmp_path / name for name in ("torn.pt", "foreign.pt", "tensor.pt"))
    torn.write_bytes(path.read_bytes()[:1000])
    foreign.write_text("no checkpoint")
    torch.save(torch.zeros(3), tensor)
    capsys.readouterr()
    assert "no such file" in refuses(watch.Args(tmp_path / "nowhere.pt"), capsys)
    (tmp_path / "folder").mkdir()
    assert "no such file" in refuses(watch.Args(tmp_path / "folder"), capsys)
    for bad in (torn, foreign, tensor):
        assert "no run's checkpoint.pt" in refuses(watch.Args(bad), capsys)
