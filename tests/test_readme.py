"""The README's code runs, and what it lists exists."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo_*.py"))
# Scalars that not every script writes by default.
WRITTEN_BY = {
    "losses/action_mean": ["ppo_mlp_gaussian"],
    "losses/action_std": ["ppo_mlp_gaussian"],
    "losses/state_loss": ["ppo_interleaved_gru_beta"],
    "losses/explained_variance_after": ["ppo_value_first"],
    "losses/advantage_variance_ratio": ["ppo_value_first"],
    "losses/clamped_targets": [],
    **dict.fromkeys(("losses/kl", "losses/beta", "losses/epochs"), ["ppo_kl_adaptive"]),
}
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# Their policies load by the base's snippet with another import, which the README names.
LIKE_THE_BASE = ["ppo_comb_dist"]


@pytest.fixture(scope="module", params=SCRIPTS)
def run(request, tmp_path_factory):
    """A short run of each script on its default environment."""
    module = importlib.import_module(request.param)
    directory = tmp_path_factory.mktemp(request.param) / "run"
    args = module.Args(
        total_timesteps=4096, num_envs=4, num_steps=1024, num_minibatches=4, update_epochs=1, num_workers=2,
        eval_episodes=1, run_dir=str(directory),
    )  # fmt: skip
    module.train(args)
    return request.param, args, directory


def test_snippet_loads_a_policy_and_acts(run, monkeypatch):
    script, args, directory = run
    shown = "ppo_mlp_gaussian" if script in LIKE_THE_BASE else script
    (snippet,) = [text for text in SNIPPETS if f"from {shown} import Agent, Args" in text]
    snippet = snippet.replace(shown, script)
    assert f"from {script} import Agent, Args" in README
    monkeypatch.syspath_prepend(ROOT)
    namespace = {}
    exec(snippet.replace("runs/my-run", str(directory)), namespace)
    assert f'gym.make("{args.env_id}")' in snippet or f'make_env("{args.env_id}")' in snippet
    assert namespace["env"].action_space.contains(namespace["action"])
    assert np.isfinite(namespace["env"].step(namespace["action"])[0]).all()


def test_every_scalar_is_explained_and_every_explained_one_is_written(run):
    script, _, directory = run
    events = EventAccumulator(str(directory)).Reload()
    written = set(events.Tags()["scalars"])
    named = set(re.findall(r"`((?:charts|losses|eval|time)/\w+)`", README))
    assert written <= named
    assert written == {name for name in named if script in WRITTEN_BY.get(name, SCRIPTS)}


def test_every_file_of_a_run_is_explained(run):
    written = {path.name for path in run[2].iterdir() if "tfevents" not in path.name}
    assert written == {"args.json", "checkpoint.pt", "result.json"}
    assert all(f"`{name}`" in README for name in written | {"eval.json"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_lists_every_script_with_its_default_environment(script):
    module = importlib.import_module(script)
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{script}.py`")]
    assert row.split("|")[4].strip() == module.Args().env_id


def test_flags_in_the_readme_exist():
    known = set()
    for name in SCRIPTS:
        for field in fields(importlib.import_module(name).Args):
            flag = field.name.replace("_", "-")
            known |= {f"--{flag}", f"--no-{flag}"} if field.type is bool else {f"--{flag}"}
    tools = "".join((ROOT / name).read_text() for name in ("benchmark.sh", "plot_runs.py"))
    known |= set(re.findall(r"--[a-z][a-z-]+", tools))
    assert set(re.findall(r"(?<=`)--[a-z][a-z-]+|(?<= )--[a-z][a-z-]+", README)) - known <= {
        "--no-deps", "--logdir", "--help", "--ntasks", "--wrap",
    }  # fmt: skip
