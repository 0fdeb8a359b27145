"""The flagship on the real HumanoidBench; skipped where that is not installed."""

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import small_args
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

import ppo_interleaved_gru_beta as ppo
import ppo_mlp_gaussian as base

pytest.importorskip("humanoid_bench")
IDS = ["h1hand-walk-v0", "h1hand-sit_hard-v0", "h1hand-bookshelf_simple-v0", "h1hand-truck-v0", "h1-walk-v0"]


@pytest.mark.parametrize("env_id", IDS)
def test_trains(env_id, tmp_path, capfd):
    result = ppo.train(small_args(ppo, tmp_path / "run", 1, env_id=env_id, num_envs=2))
    assert result["status"] == "finished" and result["global_step"] == 64
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == 4 and printed[-1].startswith("finished")  # the plan, two iterations; no word of theirs


@pytest.mark.parametrize("env_id", ["h1hand-walk-v0", "h1hand-sit_hard-v0", "h1-walk-v0"])
def test_pose_actions_are_radians_from_the_first_pose(env_id):
    """What the joints (of two fingers: the tendons) are told to do, after actions of -1, 0, 0.1 and 1."""
    env = ppo.make_env(env_id)
    robot = env.unwrapped
    env.reset(seed=1)
    pose = robot.data.actuator_length.copy()  # but for noise of 0.01 in every joint
    env.step(np.zeros(env.action_space.shape, np.float32))
    held = robot.data.ctrl.copy()
    limits = robot.model.actuator_ctrlrange.T
    np.testing.assert_allclose(held, np.clip(pose, *limits), atol=0.025)
    for action in (-1, 0.1, 1):
        env.step(np.full(env.action_space.shape, action, np.float32))
        np.testing.assert_allclose(robot.data.ctrl, np.clip(env.get_wrapper_attr("pose") + action, *limits), atol=1e-5)


@pytest.mark.parametrize("env_id", ["h1hand-walk-v0", "h1hand-push-v0"])
def test_renders(env_id, tmp_path, monkeypatch):
    """A task's own render, or the one of all tasks; the viewer, which needs OpenGL, is a stand-in."""
    viewer = SimpleNamespace(_markers=[], add_marker=lambda **_: None, render=lambda **_: np.ones((2, 2, 3), np.uint8))
    monkeypatch.setattr(MujocoRenderer, "_get_viewer", lambda *_, **__: viewer)
    env = ppo.make_env(env_id, 1, str(tmp_path))
    assert env.unwrapped.render().shape == (2, 2, 3)


def test_an_id_that_names_the_module_is_mended_too_and_no_task_prints():
    """In a process that has not imported it yet, whose first environment would open a GL context."""
    code = "import ppo_interleaved_gru_beta as p; env = p.make_env('humanoid_bench:h1-walk-v0'); print(env.render_mode)"
    code += "; from humanoid_bench.envs import cabinet; cabinet.print('Completed subtask')"
    root = Path(ppo.__file__).parent
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (process.returncode, process.stdout.splitlines()[-1]) == (0, "None"), process.stderr


@pytest.mark.parametrize("env_id, pose_actions", [("h1-walk-v0", False), ("g1-walk-v0", True)])
def test_torques_and_without_the_flag_positions_stay_as_they_are(env_id, pose_actions):
    env = ppo.make_env(env_id, pose_actions=pose_actions)
    env.reset(seed=1)
    env.step(np.zeros(env.action_space.shape, np.float32))
    np.testing.assert_allclose(env.unwrapped.data.ctrl, env.unwrapped.model.actuator_ctrlrange.mean(1), atol=1e-6)


FLAT, UPHILL = (0, 0, 0.1, 0.7, 0, 0.7, 0), (2.3, 0, 1, 0.819, 0, 0.574, 0)  # x, y, z, quaternion; face down


@pytest.mark.parametrize("pose, env_id", [(FLAT, "h1-truck-v0"), (FLAT, "g1-crawl-v0"), (UPHILL, "h1-slide-v0")])
@pytest.mark.parametrize("lying_steps", [0, 20])
def test_a_robot_that_lies_there_is_reset_in_training(lying_steps, pose, env_id):
    """Truck and crawl pay for it, and no task here ends."""
    env = ppo.make_env(env_id, lying_steps=lying_steps)
    env.reset(seed=1)
    task, n, ends = env.unwrapped, 0, (False, False)
    for _ in range(30):  # it stands
        task.set_state(task.init_qpos, task.init_qvel)
        assert not any(env.step(np.zeros(env.action_space.shape, np.float32))[2:4])
    while not any(ends) and n < 30:
        _, reward, *ends, _ = step_from(env, pose)
        n += 1
        assert (reward < 0.01) if pose is UPHILL else (reward > 0.1)
    assert (n, ends) == ((20, [False, True]) if lying_steps else (30, [False, False]))


def test_a_robot_that_is_paid_for_a_low_head_goes_on():
    env = ppo.make_env("h1-crawl-v0", lying_steps=20)
    env.reset(seed=1)
    for _ in range(30):
        _, reward, *ends, _ = step_from(env, UPHILL)
        robot = env.unwrapped.robot
        assert 0.3 < robot.head_height() - robot.left_foot_height() < 0.7
        assert reward > 0.1 and not any(ends)


def step_from(env, pose):
    task = env.unwrapped
    task.set_state(np.concatenate([pose, task.init_qpos[7:]]), 0 * task.data.qvel)
    return env.step(np.zeros(env.action_space.shape, np.float32))


def test_a_process_can_hold_more_files_than_it_might_open():
    """Each h1hand keeps 72 open, a closed one too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ppo.import_humanoid_bench.cache_clear()  # it raises the limit once in a process
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        for _ in range(5):
            ppo.make_env("h1hand-walk-v0").close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_same_seed_places_the_same_objects():
    """HumanoidBench draws where the chair stands from numpy's global generator."""
    make = partial(ppo.make_env, "h1hand-sit_hard-v0")
    observations = []
    for num_workers in (1, 2):
        with ppo.SubprocVecEnv(make, 2, num_workers, 3) as envs:
            steps = [envs.reset().copy()]
            steps += [envs.step(np.zeros((2, 61), np.float32))[0].copy() for _ in range(5)]
            observations.append(np.stack([*steps, envs.reset().copy()]))
    assert np.array_equal(*observations)
    assert not np.array_equal(observations[0][0], observations[0][-1])


def test_a_task_without_a_model_is_one_line():
    with pytest.raises(SystemExit, match="--env-id h1-bookshelf_hard-v0"):
        ppo.make_env("h1-bookshelf_hard-v0")


@pytest.mark.parametrize("name", ["h1-walk", "h1hand-walk"])
def test_other_scripts_have_its_tasks_as_they_are_or_as_the_flagship_has_them(name):
    ours, plain = ppo.make_env(f"{name}-v0"), base.make_env(f"results.pose_tasks:{name}-v0")
    pose = base.make_env(f"results.pose_tasks:{name}-pose-v0")
    assert plain.unwrapped.render_mode is None and pose.unwrapped.render_mode is None  # no GL context
    observations = []
    for env in (ours, pose, plain):
        env.reset(seed=1)
        observations.append([env.step(np.full(env.action_space.shape, 0.1, np.float32))[0] for _ in range(3)])
    assert np.array_equal(observations[0], observations[1]) and not np.array_equal(observations[0], observations[2])
    assert ["PoseActions" in str(env) for env in (ours, pose, plain)] == [True, True, False]


def test_the_base_trains_on_it(tmp_path, capfd):
    """In a process of its own, which imports the module and nothing else."""
    args = small_args(base, tmp_path / "run", 1, env_id="results.pose_tasks:h1-walk-pose-v0", num_envs=2)
    assert base.train(args)["status"] == "finished" and len(capfd.readouterr().out.splitlines()) == 4
