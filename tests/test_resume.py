"""What a run saves, what a resume makes of it, and what must not change it: everything is compared bit for bit."""

import copy
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import misbehaving
import numpy as np
import pytest
import torch
from conftest import (
    BATCH,
    TESTS,
    adaptive,
    base,
    comb,
    every,
    few,
    flagship,
    load,
    recurrent,
    resume_args,
    scripts,
    small_args,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BOX = gym.spaces.Box(-np.inf, np.inf, (3,))


class Stop(Exception):
    pass


def differences(a, b, path=""):
    """Where two nested structures of tensors and numbers differ, to the bit."""
    if type(a) is not type(b):
        return [f"{path}: {type(a)} and {type(b)}"]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: {a.keys() ^ b.keys()}"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b)) for found in differences(x, y, f"{path}[{i}]")]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    return [] if a == b else [path]


def trained(checkpoint):
    """What training has changed in a checkpoint: all but how the run was started and the time it took."""
    start = ("args", "starts", "wandb_id", "wall_seconds", "training_seconds")
    return {key: value for key, value in checkpoint.items() if key not in start}


def files(directory):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def points(directory):
    """{tag: [(step, value)]} of all curves."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def next_second():
    """Event files are read in the order of their names, which begin with the second."""
    time.sleep(1.1)


@pytest.fixture
def copied(finished, tmp_path):
    return lambda module, name="copy": Path(shutil.copytree(finished(module), tmp_path / name))


def train_until(module, args, step, then=lambda run: None):
    """Trains until `step` environment steps are counted, and stops there with an error that nobody expects."""
    with pytest.MonkeyPatch.context() as patch:
        count = module.Run.count

        def count_and_stop(run, *inputs):
            count(run, *inputs)
            if run.global_step >= step:
                then(run)
                raise Stop

        patch.setattr(module.Run, "count", count_and_stop)
        with pytest.raises(Stop):
            module.train(args)


# Loading


@every
def test_every_tensor_coefficient_and_random_state_is_restored(module, copied, monkeypatch):
    directory = copied(module)
    saved = load(directory)
    # Set apart what a fresh start might have by chance too.
    saved["rng"] = [torch.Generator().manual_seed(77).get_state()]
    saved["recent_returns"].append(12345.0)
    for group in (x["param_groups"][0] for x in saved.values() if isinstance(x, dict) and "param_groups" in x):
        group["lr"] = 0.123
    torch.save(saved, directory / "checkpoint.pt")

    live, begin = {}, module.Run.begin

    def begin_and_stop(run, *args, **parts):
        begin(run, *args, **parts)
        live.update({name: copy.deepcopy(part.state_dict()) for name, part in parts.items()})
        live.update(rng=[torch.get_rng_state()], shapes=run.snapshot["shapes"])
        live.update({name: copy.deepcopy(getattr(run, name)) for name in run.progress})
        raise Stop

    monkeypatch.setattr(module.Run, "begin", begin_and_stop)
    with pytest.raises(Stop):
        module.train(resume_args(module, directory, total_timesteps=5 * BATCH))
    assert {"model", "optimizer", "return_norm", "rng", "iteration", "global_step"} <= saved.keys()
    assert differences(trained(saved), trained(live)) == []
    assert live["wandb_id"] == saved["wandb_id"] and live["starts"][:1] == saved["starts"]
    assert differences(trained(saved), trained(load(directory))) == []
    assert not (directory / "result.json").exists()  # which says that a run has ended: this one goes on


def test_a_fixed_std_given_anew_at_a_resume_is_used(copied):
    directory, stds = copied(base), []  # a run that learned it for 3 iterations
    for iterations, fixed_std in ((4, 0.05), (5, 0.1), (6, None)):  # fractions of the action range
        base.train(resume_args(base, directory, total_timesteps=iterations * BATCH, fixed_std=fixed_std))
        stds.append(load(directory)["model"]["log_std"].exp())
    torch.testing.assert_close(stds[0] * 2, stds[1])
    torch.testing.assert_close(stds[0], torch.full((2,), 0.1))
    assert (stds[2] != stds[1]).all()


@scripts(base, comb, adaptive, flagship)
def test_a_resume_has_the_bounds_of_its_own_environment(module, copied):
    directory = copied(module)
    before = load(directory)["model"]["high"]
    module.train(resume_args(module, directory, total_timesteps=4 * BATCH, env_id="misbehaving:WideBounds-v0"))
    assert load(directory)["model"]["high"].equal(3 * before) and load(directory)["model"]["low"].equal(-3 * before)


def test_resumes_with_another_seed_draw_other_numbers(copied):
    states = []
    for seed in (1, 2, 3):
        directory = copied(base, f"seed-{seed}")
        base.train(resume_args(base, directory, total_timesteps=4 * BATCH, seed=seed))
        states.append(load(directory)["rng"][0].numpy().tobytes())
    assert len(set(states)) == 3


@few(base, recurrent)
def test_two_resumes_of_one_checkpoint_are_the_same_run(module, copied):
    checkpoints = []
    for name, num_workers in (("one", 1), ("two", 3)):
        directory = copied(module, name)
        module.train(resume_args(module, directory, total_timesteps=5 * BATCH, num_workers=num_workers))
        checkpoints.append(load(directory))
    assert checkpoints[0]["iteration"] == 5
    assert differences(*map(trained, checkpoints)) == []


def test_resume_goes_on_in_another_directory_and_leaves_its_own_alone(copied, tmp_path):
    before, directory = files(copied(base)), tmp_path / "copy"
    result = base.train(resume_args(base, directory, total_timesteps=5 * BATCH, run_dir=str(tmp_path / "new")))
    assert files(directory) == before and result["run_dir"] == str(tmp_path / "new")
    assert [at for at, _ in points(tmp_path / "new")["charts/SPS"]] == [4 * BATCH, 5 * BATCH]
    assert [start["global_step"] for start in load(tmp_path / "new")["starts"]] == [0, 3 * BATCH]
    base.train(resume_args(base, directory, total_timesteps=5 * BATCH))
    assert differences(trained(load(tmp_path / "new")), trained(load(directory))) == []


@every
def test_resume_seeds_its_environments_by_seed_and_iteration(module, copied, tmp_path, monkeypatch):
    seeds, directory = [], copied(module)

    def stop(make_env, num_envs, num_workers, seed):
        seeds.append(seed)
        raise Stop

    monkeypatch.setattr(module, "SubprocVecEnv", stop)
    for args in (resume_args(module, directory, total_timesteps=5 * BATCH), small_args(module, tmp_path / "fresh")):
        with pytest.raises(Stop):
            module.train(args)
    assert seeds == [[1, 3], [1, 0]]
    streams = [np.random.SeedSequence(seed).spawn(2)[1].generate_state(4).tolist() for seed in ([1, 3], [1, 0], 1)]
    assert streams[0] != streams[1] == streams[2]


@every
def test_same_seed_is_the_same_run_whatever_the_number_of_workers(module, tmp_path, finished):
    directories = [finished(module)]  # with two workers
    for changes in {"num_workers": 1}, {"seed": 2}:
        directories.append(tmp_path / str(len(directories)))
        module.train(small_args(module, directories[-1], eval_episodes=5, **changes))
    checkpoints = [trained(load(directory)) for directory in directories]
    returns = [json.loads((directory / "result.json").read_text())["eval_returns"] for directory in directories]
    assert differences(checkpoints[0], checkpoints[1]) == []
    first, other = (torch.cat([x.flatten() for x in checkpoints[i]["model"].values()]) for i in (0, 2))
    assert (first != other).float().mean() > 0.5
    assert returns[0] == returns[1] != returns[2]


def test_another_process_with_the_same_seed_is_the_same_run(finished, tmp_path):
    command = [sys.executable, str(TESTS.parent / "ppo_mlp_gaussian.py"), f"--run-dir={tmp_path / 'run'}", "--no-cuda"]
    command += ["--env-id=misbehaving:Healthy-v0", "--num-envs=4", "--num-steps=16", "--num-minibatches=2"]
    command += ["--update-epochs=2", f"--total-timesteps={3 * BATCH}", "--eval-episodes=5"]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"PYTHONPATH": str(TESTS)})
    assert differences(trained(load(tmp_path / "run")), trained(load(finished(base)))) == []


# Curves


@few(base)
def test_curves_go_on_without_a_gap_or_a_double_point_and_elsewhere(module, tmp_path, monkeypatch):
    logged, log, write = [], module.Run.log, module.Run._write

    def recording_log(run, scalars):
        logged.extend((name, run.global_step, torch.as_tensor(value).item()) for name, value in scalars.items())
        log(run, scalars)

    def write_iteration_2(run, name, state):
        if name != "checkpoint.pt" or state["iteration"] == 2:
            write(run, name, state)

    monkeypatch.setattr(module.Run, "log", recording_log)
    with monkeypatch.context() as patch:  # almost four iterations, of which the first two are saved
        patch.setattr(module.Run, "_write", write_iteration_2)
        train_until(module, small_args(module, tmp_path / "run", 6, checkpoint_interval=1), 4 * BATCH - 4)
    assert max(at for _, at, _ in logged) > 3 * BATCH
    expected = [entry for entry in logged if entry[1] <= 2 * BATCH]
    logged.clear()

    (tmp_path / "elsewhere").mkdir()
    directory = (tmp_path / "run").rename(tmp_path / "elsewhere" / "copy")
    next_second()
    result = module.train(resume_args(module, directory, eval_episodes=2))
    assert (result["status"], result["iterations"]) == ("finished", 6) and not (tmp_path / "run").exists()
    assert min(at for _, at, _ in logged) > 2 * BATCH
    curves = {}
    for name, at, value in expected + logged:
        curves.setdefault(name, []).append((at, float(np.float32(value))))
    found = points(directory)
    assert found.keys() == curves.keys()
    for name in curves:
        np.testing.assert_array_equal(found[name], curves[name], name)
    assert [at for at, _ in found["charts/SPS"]] == [BATCH * i for i in range(1, 7)]


def test_a_run_stopped_in_its_first_iteration_goes_on_from_its_beginning_without_double_points(tmp_path):
    train_until(base, small_args(base, tmp_path / "run"), 48, lambda run: run.log({"charts/episodic_return": -1.0}))
    assert load(tmp_path / "run")["iteration"] == 0
    next_second()
    base.train(resume_args(base, tmp_path / "run"))
    base.train(small_args(base, tmp_path / "fresh"))
    assert points(tmp_path / "run")["charts/episodic_return"] == points(tmp_path / "fresh")["charts/episodic_return"]


SCALARS = """charts/episodic_return charts/episodic_length charts/learning_rate charts/SPS losses/value_loss
losses/policy_loss losses/entropy losses/old_approx_kl losses/approx_kl losses/clipfrac losses/explained_variance
eval/episodic_return eval/episodic_length time/rollout time/update""".split()


@every
def test_curves_hold_every_scalar_and_every_episode(module, finished):
    curves, checkpoint = points(finished(module)), load(finished(module))
    args, returns = checkpoint["args"], checkpoint["recent_returns"]
    assert [name for name in SCALARS if name not in curves] == []
    for name in ("charts/SPS", "charts/learning_rate", "losses/value_loss", "time/rollout"):
        assert [at for at, _ in curves[name]] == [64, 128, 192]
    assert [at for at, _ in curves["charts/episodic_return"]] == [at for at, _ in curves["charts/episodic_length"]]
    assert len(returns) > 4
    np.testing.assert_allclose([x for _, x in curves["charts/episodic_return"]], returns)
    assert [at for at, _ in curves["eval/episodic_return"]] == [192]
    if args["anneal_lr"]:
        left = [x / args["learning_rate"] for _, x in curves["charts/learning_rate"]]
        np.testing.assert_allclose(left, [1, 2 / 3, 1 / 3], rtol=1e-6)


# Files


@every
def test_checkpoint_args_and_result_hold_what_other_tools_read(module, finished):
    directory = finished(module)
    kinds = {"args.json", "checkpoint.pt", "result.json"}
    assert {file.name for file in directory.iterdir() if not file.name.startswith("events.out.tfevents.")} == kinds
    checkpoint = load(directory)
    assert checkpoint["return_norm"]["count"] == 3 * BATCH and checkpoint["return_norm"]["var"] != 1
    counted = checkpoint["model"]["obs_norm.count"] - 3 * BATCH
    assert counted > 0 if module is adaptive else counted == 0  # its scaler starts from five episodes of its own
    assert (checkpoint["model"]["obs_norm.mean"] != 0).all() and (checkpoint["model"]["obs_norm.var"] != 1).all()
    assert not any("_orig_mod" in key for key in checkpoint["model"])

    args, result = (json.loads((directory / f"{name}.json").read_text()) for name in ("args", "result"))
    assert args == vars(small_args(module, directory, eval_episodes=5)) == result["args"] == checkpoint["args"]
    fields = """status env_id script seed args run_dir starts global_step iterations mean_return_last_100 eval_returns
    wall_seconds steps_per_second versions device"""
    assert result.keys() == set(fields.split())
    assert (result["status"], result["env_id"], result["run_dir"]) == ("finished", args["env_id"], str(directory))
    assert (result["script"], result["seed"], result["device"]) == (module.__name__, 1, "cpu")
    assert (result["global_step"], result["iterations"], len(result["eval_returns"])) == (3 * BATCH, 3, 5)
    assert result["mean_return_last_100"] == pytest.approx(np.mean(checkpoint["recent_returns"]))
    assert result["versions"]["torch"] == torch.__version__ and result["versions"]["gymnasium"] == gym.__version__
    assert result["wall_seconds"] > 0 and result["steps_per_second"] > 0
    git = ["git", "-C", str(TESTS), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    assert result["starts"] == checkpoint["starts"] == [{"global_step": 0, "changed": {}, "commit": commit}]


def test_speed_is_the_last_iterations_and_the_mean_that_of_100_episodes(tmp_path):
    with base.Run(small_args(base, tmp_path / "run")) as run:
        run.begin(SimpleNamespace(single_observation_space=BOX, single_action_space=BOX), model=torch.nn.Linear(1, 1))
        for i, seconds in enumerate((2, 8, 4)):
            run.count(64, [(0, float(64 * i + j), 1) for j in range(64)])
            now = time.perf_counter()
            run.end_iteration({}, now - seconds, now - 1)
        result = run.finish([], [])
    curves = points(tmp_path / "run")
    assert [speed for _, speed in curves["charts/SPS"]] == pytest.approx([32, 8, 16], rel=0.02)
    assert [x for _, x in curves["time/rollout"]] == pytest.approx([1, 7, 3], rel=0.02)
    assert result["mean_return_last_100"] == sum(range(92, 192)) / 100


def test_checkpoints_are_written_at_their_interval_and_at_both_ends(tmp_path, monkeypatch):
    written, write = [], base.Run._write
    monkeypatch.setattr(
        base.Run, "_write", lambda run, name, state: (written.append((name, run.iteration)), write(run, name, state))
    )
    base.train(small_args(base, tmp_path / "run", 5, checkpoint_interval=2))
    assert sorted({iteration for name, iteration in written if name == "checkpoint.pt"}) == [0, 2, 4, 5]


def test_result_counts_the_time_of_all_starts(copied):
    directory = copied(base)
    checkpoint = load(directory)
    torch.save(checkpoint | {"wall_seconds": 1000.0, "training_seconds": 500.0}, directory / "checkpoint.pt")
    result = base.train(resume_args(base, directory, total_timesteps=4 * BATCH))
    assert 1000 < result["wall_seconds"] < 1100
    assert 4 * BATCH / 600 < result["steps_per_second"] < 4 * BATCH / 500


# Evaluation


@every
def test_greedy_actions_are_of_normalised_observations(module):
    preset = getattr(module, "PRESETS", {}).get("paper", {})  # the post's scaler is another one
    agent = module.Agent(BOX, gym.spaces.Box(-1, 1, (2,)), module.Args(**preset | {"norm_obs": True}))
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    fresh, obs = copy.deepcopy(agent), torch.randn(8, 3)
    agent.obs_norm.mean += 3
    agent.obs_norm.var *= 4

    def act(agent, obs):
        memory = {flagship: "empty_windows", recurrent: "initial_state"}.get(module)
        return agent.act(obs, torch.ones(8, dtype=bool), getattr(agent, memory)(8))[0] if memory else agent.act(obs)

    torch.testing.assert_close(act(agent, 3 + 2 * obs), act(fresh, obs), atol=1e-4, rtol=0)
    assert (act(agent, 3 + 2 * obs) - act(agent, obs)).abs().max() > 0.01


@scripts(base, flagship)
def test_evaluation_counts_the_first_episodes_started_whatever_the_number_of_workers(module, copied, monkeypatch):
    directory = copied(module)
    playing, numbers, started, step = list(range(4)), itertools.count(4), {}, module.SubprocVecEnv.step

    def spy(envs, actions, active=True):
        outcome = step(envs, actions, active)
        for env, episodic_return, _ in envs.episodes:
            started[playing[env]], playing[env] = episodic_return, next(numbers)
        return outcome

    monkeypatch.setattr(module.SubprocVecEnv, "step", spy)
    args = resume_args(module, directory, total_timesteps=0, eval_episodes=16)
    returns = module.train(args)["returns"]
    assert returns == [started[i] for i in range(16)] != [*started.values()][:16]
    assert module.train(replace(args, num_workers=1))["returns"] == returns and len(set(returns)) == 16


@every
def test_evaluation_of_a_task_without_a_time_limit_ends(module):
    env = module.make_env(small_args(module, "", env="NoLimit").env_id, eval_episodes=1)
    assert env.get_wrapper_attr("_max_episode_steps") == 27000


@every
def test_videos_are_of_the_last_evaluation(module, tmp_path, capsys):
    module.train(small_args(module, tmp_path / "run", 2, "Drawn", eval_episodes=2, eval_interval=1, capture_video=True))
    names = [file.name for file in sorted((tmp_path / "run/videos").iterdir())]
    assert names == [f"rl-video-episode-{i}.mp4" for i in (0, 1)]
    assert f"recorded in {tmp_path / 'run/videos'}" in capsys.readouterr().out
    for name in names:
        (tmp_path / "run/videos" / name).unlink()
    module.train(resume_args(module, tmp_path / "run", total_timesteps=0, eval_episodes=1))  # --capture-video is saved
    assert (tmp_path / "run/videos" / names[0]).exists()


@few(base)
def test_signals_are_handled_as_before_after_a_run(module, tmp_path):
    before = [signal.getsignal(x) for x in module.SIGNALS]
    module.train(small_args(module, tmp_path / "run", 1))
    assert [signal.getsignal(x) for x in module.SIGNALS] == before


@every
def test_adam_has_the_epsilon_of_the_source(module, finished):
    groups = load(finished(module))["optimizer"]["param_groups"]
    assert {x["eps"] for x in groups} == {1e-8 if module is adaptive else 1e-5}


@pytest.mark.filterwarnings("ignore:.*script_method")  # of torch itself
@every
def test_evaluation_alone_writes_one_file_and_repeats_the_returns(module, copied, monkeypatch):
    directory = copied(module)
    before = files(directory)
    monkeypatch.chdir(directory.parent)
    monkeypatch.setenv("CXX", "/nonexistent")  # a policy of a compiled run is played without a compiler
    returned = module.train(resume_args(module, directory / "checkpoint.pt", total_timesteps=0, compile=True))
    after = files(directory)
    result = json.loads((directory / "eval.json").read_text())
    assert after == before | {"eval.json": after["eval.json"]} and returned == result
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]  # nothing where it is started
    assert result.keys() == {"returns", "lengths", "mean", "global_step"}
    assert result["returns"] == json.loads((directory / "result.json").read_text())["eval_returns"]
    assert result["mean"] == pytest.approx(np.mean(result["returns"])) and result["global_step"] == 3 * BATCH
    assert len(result["lengths"]) == 5 and all(1 <= length <= 20 for length in result["lengths"])


@every
def test_evaluation_does_not_change_the_training(module, tmp_path, finished, monkeypatch):
    """Nor does it make an environment in the parent, which makes one, that tells its spaces."""
    monkeypatch.setattr(misbehaving.Misbehaving, "made", 0)
    module.train(small_args(module, tmp_path / "with", eval_episodes=3, eval_interval=1))
    assert misbehaving.Misbehaving.made == 1
    without = load(finished(module))  # but at the end
    assert differences(trained(without), trained(load(tmp_path / "with"))) == []
    for name in ("eval/episodic_return", "eval/episodic_length"):
        assert [at for at, _ in points(tmp_path / "with")[name]] == [64, 128, 192]


@few(base, flagship, recurrent)
@pytest.mark.parametrize("cut, evaluated", [(2, [64, 192]), (3, [64, 128, 192])], ids=["in between", "at the end"])
def test_of_evaluations_that_were_cut_short_only_the_last_is_made_again(module, cut, evaluated, tmp_path, monkeypatch):
    evaluate, calls = module.evaluate, []

    def evaluate_and_stop(*inputs):
        calls.append(inputs)
        if len(calls) == cut:
            raise Stop
        return evaluate(*inputs)

    monkeypatch.setattr(module, "evaluate", evaluate_and_stop)
    with pytest.raises(Stop):
        module.train(small_args(module, tmp_path / "run", eval_episodes=3, eval_interval=1, checkpoint_interval=0))
    assert load(tmp_path / "run")["iteration"] == cut
    next_second()
    assert len(module.train(resume_args(module, tmp_path / "run"))["eval_returns"]) == 3
    assert [at for at, _ in points(tmp_path / "run")["eval/episodic_return"]] == evaluated


def test_evaluation_is_printed_even_if_it_can_not_be_written(copied, capsys):
    directory = copied(base)
    (directory / "eval.json").mkdir()
    with pytest.raises(SystemExit, match=r"^[^\n]*eval.json'$"):
        base.train(resume_args(base, directory, total_timesteps=0))
    assert "evaluation: mean return " in capsys.readouterr().out


# Environments in other processes, against one loop in this process


def make_healthy():
    return gym.make("misbehaving:Healthy-v0", disable_env_checker=True)


class Reference:
    """What SubprocVecEnv does, one environment after the other: the order of the draws is part of a seed's meaning."""

    def __init__(self, num_envs, seed):
        self.envs = [make_healthy() for _ in range(num_envs)]
        self.generators = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(num_envs)]
        self.first_seeds = [int(generator.integers(2**31)) for generator in self.generators]
        self.counts = {}
        for env, generator in zip(self.envs, self.generators):
            env.action_space.seed(int(generator.integers(2**31)))

    def reset_one(self, i):
        draw = int(self.generators[i].integers(2**32))
        random.seed(draw)
        np.random.seed(draw)
        seed, self.first_seeds[i], self.counts[i] = self.first_seeds[i], None, (0.0, 0)
        return self.envs[i].reset(seed=seed)[0].astype(np.float32)

    def reset(self):
        self.obs = np.stack([self.reset_one(i) for i in range(len(self.envs))])
        return self.obs.copy()

    def step(self, actions, active):
        final_obs, rewards, episodes = {}, np.zeros(len(actions), np.float32), []
        terminated, truncated = np.zeros((2, len(actions)), bool)
        for i in np.flatnonzero(active):
            self.obs[i], reward, terminated[i], truncated[i], _ = self.envs[i].step(actions[i])
            rewards[i], self.counts[i] = reward, (self.counts[i][0] + reward, self.counts[i][1] + 1)
            if terminated[i] or truncated[i]:
                final_obs[i] = self.obs[i].copy()
                episodes.append((i, *self.counts[i]))
                self.obs[i] = self.reset_one(i)
        return self.obs.copy(), rewards, terminated, truncated, final_obs, episodes


@few(base, flagship, recurrent)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_environments_do_what_a_plain_loop_does(module, num_workers):
    reference, actions = Reference(5, [7, 3]), np.random.default_rng(0).uniform(-2, 2, (150, 5, 2)).astype(np.float32)
    active = np.random.default_rng(1).random((150, 5)) < 0.8
    active[:70] = True
    ended = {"terminated": 0, "truncated": 0, "while others rest": 0}
    with module.SubprocVecEnv(make_healthy, 5, num_workers, [7, 3]) as envs:
        assert len(envs.workers) == num_workers
        np.testing.assert_array_equal(envs.reset(), reference.reset())
        for t, action in enumerate(actions):
            if t == 33:  # in the middle of an episode
                np.testing.assert_array_equal(envs.reset(), reference.reset())
                assert envs.episodes == []
            *found, episodes = [*(envs.step(action) if t < 70 else envs.step(action, active[t])), envs.episodes]
            *expected, final_obs, expected_episodes = reference.step(action.clip(-1, 1), active[t])
            for x, y in zip(found, expected):
                np.testing.assert_array_equal(x, y)
            for i, o in final_obs.items():
                np.testing.assert_array_equal(envs.final_obs[i], o)
            assert episodes == expected_episodes
            assert all(tuple(map(type, x)) == (int, float, int) for x in episodes)
            ended["terminated"] += found[2].sum()
            ended["truncated"] += (found[3] & ~found[2]).sum()
            ended["while others rest"] += len(episodes) > 0 and not active[t].all()
    assert min(ended.values()) >= 3  # all of these happened


@scripts(flagship, recurrent)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_halves_that_take_turns_do_what_a_plain_loop_does(module, num_workers):
    """Each half is sent on before the other one, which is under way, has been received."""
    reference, actions = Reference(5, [7, 3]), np.random.default_rng(0).uniform(-1, 1, (100, 5, 2)).astype(np.float32)
    halves, ended = (slice(0, None, 2), slice(1, None, 2)), 0
    with module.SubprocVecEnv(make_healthy, 5, num_workers, [7, 3]) as envs:
        np.testing.assert_array_equal(envs.reset(), reference.reset())
        for t in range(len(actions) + 1):
            for rows in halves:
                if t > 0:
                    found, episodes = envs.receive(rows), envs.episodes
                    active = np.isin(np.arange(5), np.arange(5)[rows])
                    *expected, final_obs, expected_episodes = reference.step(actions[t - 1], active)
                    for x, y in zip(found, expected):
                        np.testing.assert_array_equal(x, y[rows])
                    for i, o in final_obs.items():
                        np.testing.assert_array_equal(envs.final_obs[i], o)
                    assert episodes == expected_episodes
                    ended += len(episodes)
                if t < len(actions):
                    envs.send(actions[t, rows], rows=rows)
        *found, _, _ = *envs.step(actions[0]), None, None
        for x, y in zip(found, reference.step(actions[0], np.ones(5, bool))):
            np.testing.assert_array_equal(x, y)
    assert ended >= 10


@scripts(flagship, recurrent)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_halves_of_one_or_three_environments_train(module, num_envs, tmp_path):
    minibatches = 1 if module is recurrent else 2  # it takes whole environments
    args = small_args(module, tmp_path / "run", num_envs=num_envs, num_minibatches=minibatches)
    assert module.train(args)["global_step"] == args.total_timesteps - args.total_timesteps % (16 * num_envs)


def test_environments_return_views_of_shared_memory_in_their_types():
    with base.SubprocVecEnv(make_healthy, 3, 2, 1) as envs:
        first = envs.reset()
        obs, rewards, terminated, truncated = kept = envs.step(np.zeros((3, 2)))
        assert np.shares_memory(first, obs) and np.shares_memory(obs, envs.obs)
        assert all(np.shares_memory(x, y) for x, y in zip(kept, envs.step(np.zeros((3, 2)))))
        assert (obs.dtype, rewards.dtype) == (np.float32, np.float32) and envs.final_obs.dtype == np.float32
        assert terminated.dtype == truncated.dtype == bool
        assert obs.shape == envs.final_obs.shape == (3, 3) and rewards.shape == terminated.shape == (3,)
        assert envs.single_observation_space.shape == (3,) and envs.single_action_space.shape == (2,)


def test_seeds_share_no_stream():
    def rows(seed):
        with base.SubprocVecEnv(make_healthy, 6, 2, seed) as envs:
            found = [row.tobytes() for row in envs.reset()]
            for _ in range(20):  # the time limit: everyone has begun another episode
                envs.step(np.zeros((6, 2)))
            return found + [row.tobytes() for row in envs.reset()]

    found = {str(seed): rows(seed) for seed in (1, 2, [1, 1], [1, 2], [1, 2**31])}
    assert len(set(sum(found.values(), []))) == 5 * 12
    assert rows(1) == found["1"]


def make_random():
    """Its constructor draws from both global generators."""
    drawn = [np.random.normal(), random.gauss(0, 1), 0]
    return gym.wrappers.TransformObservation(make_healthy(), partial(np.add, drawn), misbehaving.Misbehaving.space)


def test_what_constructors_draw_is_seeded_too():
    def rows(make, num_workers):
        with base.SubprocVecEnv(make, 4, num_workers, 1) as envs:
            return envs.reset().copy()

    found = rows(make_random, 1)
    assert (rows(make_random, 2) == found).all() and (rows(make_random, 4) == found).all()
    drawn = found - rows(make_healthy, 1)
    assert len(np.unique(drawn[:, :2].round(4))) == 8  # each environment draws its own


def test_workers_leave_signals_to_the_parent():
    with base.SubprocVecEnv(make_healthy, 2, 2, 1) as envs:
        envs.reset()
        for signum in (signal.SIGINT, signal.SIGTERM):
            for *_, process in envs.workers:
                os.kill(process.pid, signum)
            envs.step(np.zeros((2, 2)))
        assert all(process.is_alive() for *_, process in envs.workers)


def test_environments_that_nobody_closes_do_not_keep_the_process(tmp_path):
    """Not even where something else asked first to be told of the exit."""
    (tmp_path / "script.py").write_text("""
import weakref
from functools import partial

class Thing:
    pass

kept = Thing()
weakref.finalize(kept, print, "goodbye")

import ppo_mlp_gaussian as base

if __name__ == "__main__":
    envs = base.SubprocVecEnv(partial(base.make_env, "misbehaving:Healthy-v0"), 2, 2, 1)
    print(envs.reset().shape)
""")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, str(tmp_path / "script.py")]
    output = subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True, text=True).stdout
    assert "(2, 3)" in output and "goodbye" in output


def test_close_leaves_no_process_of_environments_that_hang_in_it():
    with base.SubprocVecEnv(partial(gym.make, "misbehaving:HangInClose-v0"), 2, 2, 1) as envs:
        envs.reset()
    envs.close()  # twice is no error
    assert multiprocessing.active_children() == []
