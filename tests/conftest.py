import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads that wait in turns are slow
TESTS = Path(__file__).resolve().parent
# A shell ignores Ctrl-C in what it starts with `&`, children inherit that, and bash can't trap what was ignored then.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import torch  # noqa: E402

import ppo_comb_dist as comb  # noqa: E402
import ppo_interleaved_gru_beta as flagship  # noqa: E402
import ppo_kl_adaptive as adaptive  # noqa: E402
import ppo_lstm_atari as recurrent  # noqa: E402
import ppo_mlp_gaussian as base  # noqa: E402
import ppo_value_first as value_first  # noqa: E402

SCRIPTS = {
    "base": base, "flagship": flagship, "comb": comb, "value-first": value_first, "adaptive": adaptive,
    "recurrent": recurrent,
}  # fmt: skip
NAMES = {module: name for name, module in SCRIPTS.items()}
every = pytest.mark.parametrize("module", SCRIPTS.values(), ids=SCRIPTS)


def scripts(*modules):
    return pytest.mark.parametrize("module", modules, ids=[NAMES[module] for module in modules])


def few(*now):
    """What is the same text in all and takes long: of the scripts that are not named, these are slow tests."""
    marks = {name: [] if module in now else pytest.mark.slow for name, module in SCRIPTS.items()}
    return pytest.mark.parametrize("module", [pytest.param(SCRIPTS[x], id=x, marks=marks[x]) for x in SCRIPTS])


BATCH = 64  # steps in an iteration of small_args


def small_args(module, directory, iterations=3, env="Healthy", **changes):
    """Args of a run that takes a second, of the environment misbehaving:{env}-v0."""
    sizes = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "num_workers": 2}
    env = f"Discrete{env}" if module is recurrent else env
    sizes |= {"eval_episodes": 0, "cuda": False, "norm_obs": True, "norm_reward": True}
    sizes |= {"env_id": f"misbehaving:{env}-v0", "total_timesteps": iterations * BATCH}
    return module.Args(**sizes | {"run_dir": str(directory)} | changes)


def load(directory):
    return torch.load(directory / "checkpoint.pt", weights_only=True, map_location="cpu")


def resume_args(module, path, **changes):
    saved = load(path if path.is_dir() else path.parent)["args"]
    return module.Args(**saved | {"resume": str(path), "run_dir": None} | changes)


def parse(monkeypatch, module, *flags):
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, flags)])
    return module.parse_args(getattr(module, "preset_args", module.Args)())


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """finished(module) -> directory of a run of three iterations with five evaluation episodes; only to be read."""
    folder = tmp_path_factory.mktemp("runs")

    def finished(module):
        directory = folder / module.__name__
        if not directory.exists():
            module.train(small_args(module, directory, eval_episodes=5))
        return directory

    return finished
