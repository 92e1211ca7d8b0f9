"""What makes the script fast leaves the algorithm as it is."""

import itertools
import shutil
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import ROOT, Bandit, Noise, SmallNetwork, column, load, rows, start, without_clock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gns_baseline
import pqn_abs
import pqn_abs_xl

# --- Groups of environments ---


class Lives(gymnasium.Env):
    """An environment with a random generator of its own, so that it plays the same game in whatever group it is."""

    observation_space = gymnasium.spaces.Box(0, 255, (6,), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lives = 3
        return self.frame(), {"lives": self.lives}

    def step(self, action):
        self.lives -= self.np_random.random() < 0.1
        reward = 2.0 * (self.np_random.integers(4) == action)
        return self.frame(), reward, self.lives == 0, self.np_random.random() < 0.03, {"lives": self.lives}

    def frame(self):
        return self.np_random.integers(256, size=6, dtype=np.uint8)


def lives(args):
    envs = SyncVectorEnv([Lives] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.fire_action = 2
    return envs


@pytest.mark.parametrize("episodic_life", [False, True])
@pytest.mark.parametrize("groups", [2, 3, 7])
def test_groups_of_environments_change_no_number(train, groups, episodic_life):
    """7 environments in one group, in two of 3 and 4, three of 2, 2 and 3, and seven of one."""
    options = {"num_envs": 7, "total_timesteps": 1000, "learning_rate": 0.01, "start_e": 0.3, "end_e": 0.3}
    options |= {"adapt_frequency": 2, "episodic_life": episodic_life}
    one, several = (train(lives, env_groups=n, **options) for n in (1, groups))
    for name, parameter in load(one)["network"].items():
        torch.testing.assert_close(parameter, load(several)["network"][name], rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(*(without_clock(run / "metrics.csv") for run in (one, several)), strict=True):
        assert [bool(v) for v in ours.values()] == [bool(v) for v in theirs.values()]
        assert {k: float(v or 0) for k, v in ours.items()} == pytest.approx(
            {k: float(v or 0) for k, v in theirs.items()}, rel=1e-3
        )
    assert len(rows(one / "episodes.csv")) > 20
    games = [
        sorted((r["episodic_return"], r["episodic_length"]) for r in rows(run / "episodes.csv"))
        for run in (one, several)
    ]
    assert games[0] == games[1]


def test_groups_of_environments_step_at_the_same_time(train):
    """Each step waits for one of the other group, so that a run in which they came one after the other would stop."""

    class Together(Bandit):
        def step(self, actions):
            meeting.wait(timeout=30)
            return super().step(actions)

    meeting = threading.Barrier(2)
    train(lambda args: Together(args.num_envs), num_envs=4, env_groups=2, total_timesteps=256)


# --- bfloat16 ---


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])
@pytest.mark.parametrize("trained", [False, True])
def test_bfloat16_agrees_with_float32_on_real_frames(train, trained, device):
    """Greedy actions, and the gradient of a batch with the targets that each precision computes for itself.

    After a long run the cosine is less: see results/README.md.
    """
    make_envs, make_network = pqn_abs.make_envs, pqn_abs.QNetwork
    envs = make_envs(pqn_abs.Args(num_envs=8))
    torch.manual_seed(0)
    network = make_network(envs)
    if trained:
        options = {"num_envs": 8, "num_minibatches": 16, "total_timesteps": 4000, "end_e": 0.5}
        network.load_state_dict(load(train(make_envs, make_network, **options))["network"])
    rng, steps = np.random.default_rng(0), []
    frames, _ = envs.reset(seed=1)
    for _ in range(100):
        actions = rng.integers(4, size=8)
        following, reward, terminated, *_ = envs.step(actions)
        steps.append([torch.from_numpy(x) for x in (frames, actions, np.sign(reward).astype("f"), terminated)])
        frames = following
    obs, actions, rewards, terminated = map(torch.stack, zip(*steps, strict=True))
    frames, results = torch.from_numpy(frames), []
    for precision, name in ((torch.float32, "cpu"), (torch.bfloat16, device)):
        network.to(name).zero_grad()
        with torch.autocast(name, torch.bfloat16, enabled=precision == torch.bfloat16):
            q = torch.stack([network(x.to(name)).cpu() for x in obs])
            values = torch.cat([q.detach(), network(frames.to(name)).detach().cpu()[None]]).max(-1).values
        returns = pqn_abs.lambda_returns(rewards, values[1:], terminated, torch.zeros_like(terminated), 0.99, 0.65)
        (q.gather(-1, actions[..., None])[..., 0] - returns).square().mean().backward()
        results.append((q.argmax(-1), torch.cat([p.grad.flatten().cpu() for p in network.parameters()])))
    (plain_actions, plain_gradient), (fast_actions, fast_gradient) = results
    assert (plain_actions == fast_actions).float().mean() >= 0.99
    assert torch.cosine_similarity(plain_gradient, fast_gradient, dim=0) >= 0.999
    assert not torch.equal(plain_gradient, fast_gradient)


# --- Threads that take a share of a mini-batch each ---


@pytest.mark.parametrize("script", [pqn_abs, pqn_abs_xl, gns_baseline])
def test_threads_compute_the_gradient_of_the_minibatch_and_the_same_bits_each_time(train, script):
    """6 threads for PyTorch make 3 of the script's, with two each, and a mini-batch of 80 or more makes 3 shares."""

    class Network(SmallNetwork):
        def forward(self, x):
            if torch.is_grad_enabled():
                seen[-1].add((threading.current_thread().name, torch.get_num_threads(), len(x)))
            return super().forward(x)

    def run(num_threads):
        seen.append(set())
        torch.set_num_threads(num_threads)
        try:
            return load(train(Noise(10), lambda envs, *sizes: Network(envs), script, **options))["network"]
        finally:
            torch.set_num_threads(1)

    seen, options = [], {"total_timesteps": 2000, "learning_rate": 0.01, "adapt_frequency": 2, "env_groups": 1}
    one, three, again = run(1), run(6), run(6)
    for name, parameter in three.items():
        assert torch.equal(parameter, again[name])
        torch.testing.assert_close(parameter, one[name], rtol=1e-3, atol=1e-4)
    assert {thread for thread, *_ in seen[0]} == {"MainThread"}
    assert len({thread for thread, *_ in seen[1]}) > 1 and "MainThread" not in {thread for thread, *_ in seen[1]}
    assert {threads for _, threads, _ in seen[1]} == {2}
    assert max(size for *_, size in seen[1]) * 3 == pytest.approx(max(size for *_, size in seen[0]), abs=3)


def test_chunks_are_few_and_of_equal_size(train):
    """A mini-batch of 1280 for 3 threads, at most 128 (512 bytes) a chunk: 4 for each; of 128 there would be 10."""

    class Network(SmallNetwork):
        def forward(self, x):
            if torch.is_grad_enabled():
                sizes.append(len(x))
            return super().forward(x)

    sizes = []
    torch.set_num_threads(3)
    try:
        train(Noise(40), Network, total_timesteps=1, num_minibatches=1, update_epochs=1, env_groups=1)
    finally:
        torch.set_num_threads(1)
    assert sorted(sizes) == [106] * 4 + [107] * 8


def test_network_may_have_frozen_and_unused_parameters(train):
    class Network(SmallNetwork):
        def __init__(self, envs):
            super().__init__(envs)
            self.unused = torch.nn.Parameter(torch.ones(3))
            next(self.parameters()).requires_grad_(False)
            starts.append({name: weight.clone() for name, weight in self.state_dict().items()})

    starts = []
    end = load(train(Noise(10), Network, total_timesteps=1000, learning_rate=0.01))["network"]
    frozen = next(iter(end))
    assert {name for name in end if torch.equal(end[name], starts[0][name])} == {frozen, "unused"}


# --- Memory ---


@pytest.mark.parametrize("script, longest", [(pqn_abs, 64), (pqn_abs_xl, 128)])
def test_observations_are_kept_once_as_bytes_and_no_float_copy_exceeds_a_minibatch(train, script, longest):
    """Rollouts of 1280 transitions in 4 mini-batches at first, then longer ones, with room for 40 x longest."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.shape[-1:] == (6,):
                    storage = x.untyped_storage()
                    seen.setdefault(x.dtype, set()).add((storage.data_ptr(), storage.nbytes() // x.itemsize))
            return result

    seen = {}
    with Watch():
        folder = train(Noise(40), script=script, total_timesteps=4000, adapt_frequency=1, reference_states=100)
    minibatch = max(column(folder / "metrics.csv", "abs/batch_size", int)) // 4
    sizes = {dtype: [size for _, size in storages] for dtype, storages in seen.items()}
    assert [size for size in sizes.pop(torch.uint8) if size > minibatch * 6] == [longest * 40 * 6]
    assert max(max(others) for others in sizes.values()) <= minibatch * 6


# --- Compilation ---


def test_without_a_compiler_a_run_goes_on(tmp_path):
    options = ("--num-envs", 4, "--total-timesteps", 300, "--compile", "--runs-dir", tmp_path, "--device", "cpu")
    process = start(
        ROOT / "tests" / "driver.py", "noise", *options, CXX="none", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "c")
    )
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors.count("--compile: ") == 1 and "Traceback" not in errors
    (folder,) = tmp_path.glob("*__pqn_abs__*")
    assert str(folder) in output and load(folder)["global_step"] >= 300


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_network_learns_the_same_and_few_times_is_it_compiled(train, monkeypatch, capsys):
    plain, compiled = (train(Noise(4), total_timesteps=1, learning_rate=0.01, compile=on) for on in (False, True))
    for name, parameter in load(plain)["network"].items():
        torch.testing.assert_close(parameter, load(compiled)["network"][name], rtol=1e-3, atol=1e-4)
    lengths = itertools.cycle([20, 33, 47, 16, 64, 25])
    monkeypatch.setattr(pqn_abs, "rollout_length", lambda *args: next(lengths))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    folder = train(Noise(4), total_timesteps=1200, adapt_frequency=1, compile=True)
    assert len(set(column(folder / "metrics.csv", "abs/rollout_length"))) == 7
    assert 3 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
    assert "--compile:" not in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_network_keeps_the_gradient_of_its_float32_head(train, monkeypatch):
    """Autocast is on when the compiled graph is made, and would make that gradient in bfloat16; with 4 threads, too."""

    class Network(SmallNetwork):
        def forward(self, x):
            x = self.layers[:3](x / 255)
            with torch.autocast("cpu", enabled=False):
                return self.layers[3](x.float())

    def grad(loss, parameters, original=torch.autograd.grad, **options):
        gradients = original(loss, parameters, **options)
        if type(gradients[2]) is torch.Tensor:  # it is the script's call, not the compiler's
            heads.append(gradients[2].clone())
        return gradients

    heads = []
    monkeypatch.setattr(torch.autograd, "grad", grad)
    torch.set_num_threads(4)
    try:
        train(Noise(4), Network, total_timesteps=1, compile=True, precision="bfloat16", num_minibatches=1)
    finally:
        torch.set_num_threads(1)
    assert heads and not any(torch.equal(head, head.bfloat16().float()) for head in heads)


# --- CUDA, where there is one ---


@no_gpu
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"episodic_life": True, "env_groups": 3}])
def test_gpu_computes_what_the_cpu_does(train, options):
    """A greedy rollout of 896 transitions and one gradient step on all of them: what is drawn has no effect."""
    options |= {"num_envs": 28, "start_e": 0.0, "end_e": 0.0, "num_minibatches": 1, "update_epochs": 1}
    gpu, cpu = (train(lives, total_timesteps=1, learning_rate=0.01, device=name, **options) for name in ("cuda", "cpu"))
    for name, parameter in load(cpu)["network"].items():
        torch.testing.assert_close(parameter, load(gpu)["network"][name].cpu(), rtol=1e-2, atol=1e-3)
    for name in ("losses/td_loss", "losses/q_values", "losses/grad_norm"):
        assert column(gpu / "metrics.csv", name) == pytest.approx(column(cpu / "metrics.csv", name), rel=1e-2)
    args = pqn_abs.parse_args(["--resume", str(gpu / "checkpoint.pt"), "--device", "cpu", "--total-timesteps", "2000"])
    assert load(train(lives, **vars(args)))["global_step"] >= 2000
