"""Runs the script on a small environment, in a process of its own:  driver.py KIND [arguments of pqn_abs.py]

KIND is noise or bandit (with a small network), slow (noise at a tenth of a second a step) or catch (with the real
network). With DUMP=folder in the environment, the process leaves its id there, as RANK.pid, and at its end what it saw,
as RANK.pt.
"""

import copy
import os
import sys
import time
from pathlib import Path

import torch
from catch import Catch
from helpers import Bandit, Noise, SmallNetwork, record

import pqn_abs


class Slow(Noise):
    def step(self, actions):
        time.sleep(0.1)
        return super().step(actions)


kind = {"noise": Noise, "bandit": Bandit, "slow": Slow, "catch": Catch}[sys.argv[1]]
seen = {"orders": [], "lengths": []}
dump, rank = os.environ.get("DUMP"), os.environ.get("RANK", "0")
if dump:
    Path(dump, f"{rank}.pid").write_text(str(os.getpid()))


def make_envs(args):
    seen["envs"] = record(kind(args.num_envs)) if dump else kind(args.num_envs)
    return seen["envs"]


def make_network(envs, make=pqn_abs.QNetwork if kind is Catch else SmallNetwork):
    seen["network"] = make(envs)
    seen["start"] = copy.deepcopy(seen["network"].state_dict())
    return seen["network"]


def randperm(*args, original=torch.randperm, **options):
    seen["orders"].append(original(*args, **options))
    return seen["orders"][-1]


def rollout_length(*args, original=pqn_abs.rollout_length):
    seen["lengths"].append(original(*args))
    return seen["lengths"][-1]


torch.set_num_threads(1)
pqn_abs.make_envs, pqn_abs.QNetwork, pqn_abs.rollout_length, torch.randperm = (
    make_envs,
    make_network,
    rollout_length,
    randperm,
)
pqn_abs.main(pqn_abs.parse_args(sys.argv[2:]))
if dump:
    envs, network = seen.pop("envs"), seen.pop("network")
    seen |= {"end": network.state_dict(), "seed": envs.seed, "steps": envs.steps}
    torch.save(seen, Path(dump, f"{rank}.pt"))
