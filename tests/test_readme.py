"""The code of the README and the pages runs, and what they list exists."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = sorted(path.stem for path in ROOT.glob("ppo_*.py"))
# Scalars that not every script writes by default.
WRITTEN_BY = {
    "losses/action_std": ["ppo_mlp_gaussian"],
    **dict.fromkeys(("losses/state_loss", "losses/gamma"), ["ppo_interleaved_gru_beta"]),
    "losses/explained_variance_after": ["ppo_value_first"],
    "losses/advantage_variance_ratio": ["ppo_value_first"],
    "losses/clamped_targets": [],
    **dict.fromkeys(("losses/kl", "losses/beta", "losses/epochs"), ["ppo_kl_adaptive"]),
}
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
TEXT = "\n".join([README, *PAGES.values()])


@pytest.fixture(scope="module", params=SCRIPTS)
def run(request, tmp_path_factory):
    """A short run of each script on its default environment."""
    module = importlib.import_module(request.param)
    directory = tmp_path_factory.mktemp(request.param) / "run"
    num_steps = 256 if request.param == "ppo_lstm_atari" else 1024  # in which an episode ends
    args = module.Args(
        total_timesteps=4 * num_steps, num_envs=4, num_steps=num_steps, num_minibatches=4, update_epochs=1,
        num_workers=2, eval_episodes=1, run_dir=str(directory),
    )  # fmt: skip
    module.train(args)
    return request.param, args, directory


def snippets(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_snippet_loads_a_policy_and_plays_an_episode(run, monkeypatch, capsys):
    script, args, directory = run
    (snippet,) = [text for text in snippets(PAGES[script]) if f"from {script} import Agent, Args" in text]
    assert f'gym.make("{args.env_id}")' in snippet or f'make_env("{args.env_id}")' in snippet
    monkeypatch.syspath_prepend(ROOT)
    namespace = {}
    exec(snippet.replace("runs/my-run", str(directory)), namespace)
    assert namespace["env"].action_space.contains(namespace["action"])
    assert re.search(r"-?\d", capsys.readouterr().out)  # the episode's return


def test_an_environment_of_ones_own_is_learned(tmp_path, monkeypatch):
    (snippet,) = snippets(README)
    (tmp_path / "my_env.py").write_text(snippet)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("ppo_mlp_gaussian")
    result = module.train(module.Args(env_id="my_env:Reach-v0", total_timesteps=16384, eval_episodes=5, cuda=False))
    assert np.mean(result["eval_returns"]) > -10  # who never moves gets -50, who goes straight to 0 some -3


def test_tuners_get_what_they_need(tmp_path, monkeypatch):
    optuna, cleanrl = snippets(PAGES["clusters"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace())
    namespace = {"__name__": "tuned"}
    exec(optuna.replace("50_000", "4_096"), namespace)
    assert namespace["objective"](SimpleNamespace(suggest_float=lambda *_, **__: 1e-3)) > 1

    # As CleanRL's tuner does it: flags alone, a run as the main file, and then its global `run_name`.
    # Runpy puts the file's name in the place of the first flag.
    (tmp_path / "tuned.py").write_text(cleanrl)
    flags = ["--exp-name=lost", "--learning-rate=1e-3", "--total-timesteps=4096", "--env-id=InvertedPendulum-v5"]
    program = f"""import runpy, sys; sys.argv = {flags}
print(runpy.run_path("tuned.py", run_name="__main__")["run_name"])"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment, timeout=120)
    events = EventAccumulator(f"runs/{output.splitlines()[-1]}").Reload()
    assert len(events.Scalars("charts/episodic_return")) > 10
    assert json.loads(Path(f"runs/{output.splitlines()[-1]}/args.json").read_text())["learning_rate"] == 1e-3


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{stem}.md" for stem in PAGES), "results/README.md"])
def test_links_lead_somewhere_and_pages_are_short(name):
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) <= (200 if name == "README.md" else 250)
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), target
        headings = [line.strip("# ").lower() for line in path.read_text().splitlines()] if anchor else [anchor]
        headings = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]
        assert anchor in headings, f"{target}#{anchor}"


def test_every_scalar_is_explained_and_every_explained_one_is_written(run):
    script, _, directory = run
    events = EventAccumulator(str(directory)).Reload()
    written = set(events.Tags()["scalars"])
    named = set(re.findall(r"`((?:charts|losses|eval|time)/\w+)`", TEXT))
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


def test_flags_in_the_pages_exist():
    known = set()
    for name in SCRIPTS:
        for field in fields(importlib.import_module(name).Args):
            flag = field.name.replace("_", "-")
            known |= {f"--{flag}", f"--no-{flag}"} if field.type is bool else {f"--{flag}"}
    tools = [
        ROOT / "benchmark.sh",
        ROOT / "plot_runs.py",
        ROOT / "tests/bench_speed.py",
        *(ROOT / "results").glob("*.py"),
    ]
    tools = "".join(path.read_text() for path in tools)
    known |= set(re.findall(r"--[a-z][a-z-]+", tools))
    assert set(re.findall(r"(?<=`)--[a-z][a-z-]+|(?<= )--[a-z][a-z-]+", TEXT)) - known <= {
        "--no-deps", "--logdir", "--help", "--ntasks", "--wrap", "--torch-backend",
        "--head", "--address", "--port", "--num-cpus", "--nodes", "--ntasks-per-node", "--block",
    }  # fmt: skip
