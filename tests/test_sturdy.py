"""What can go wrong around a run: each case ends soon, with one line that says what to do, and loses nothing."""

import importlib
import inspect
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import uuid
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import BATCH, SCRIPTS, TESTS, every, few, load, parse, resume_args, scripts, small_args
from misbehaving import FAULT_STEP, Constant
from test_resume import files

base, flagship, comb, value_first, adaptive, recurrent = SCRIPTS.values()
CONTINUOUS = [base, flagship, comb, value_first, adaptive]
START_LIMIT = 120  # seconds to start and reach what is waited for, on a machine that is busy
LIMIT = 20  # seconds to report a fault: it should take 5
BUSY = max(1, os.getloadavg()[0] / os.cpu_count())  # how many share a core now
SIGNAL_LIMIT = 5 * BUSY  # seconds to save and leave after a signal
ENDLESS = "--total-timesteps=64000000", "--checkpoint-interval=0"

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds orphans in /proc")


def text(module):
    """Of the processes and what they do, which five scripts share."""
    return [inspect.getsource(getattr(module, name, str)) for name in ("put", "worker", "SubprocVecEnv")]


class Process:
    """A script in a session of its own; it and everything it starts are found by a mark in their environment."""

    def __init__(self, file, directory, flags, variables):
        self.directory, self.log = directory, directory.with_suffix(".log")
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([*variables.pop("PYTHONPATH", []), str(TESTS), str(TESTS.parent)])
        environment = os.environ | {"PYTHONPATH": path, "MISBEHAVING_LOG": str(self.log), "TEST_MARK": self.mark}
        # Files, not pipes: nobody waits for an orphan to close them.
        self.stdout, self.stderr = directory.with_suffix(".out"), directory.with_suffix(".err")
        with open(self.stdout, "w") as stdout, open(self.stderr, "w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(file), *flags],
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                cwd=directory.parent,
                env=environment | variables,
                start_new_session=True,
            )

    def pids(self):
        """Of every process of this run that still lives; a zombie has no environment."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self.mark.encode() in file.read_bytes():
                    found.append(int(file.parent.name))
        return found

    def kill(self):
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait_until(self, condition):
        end = time.monotonic() + START_LIMIT
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.stderr.read_text()}"
            assert time.monotonic() < end, f"nothing happened: {self.stdout.read_text()}"
            time.sleep(0.02)

    def events(self, what):
        """[(pid, time)] of what the environments wrote down."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(int(pid), float(at)) for event, pid, at in map(str.split, lines) if event == what]

    def steps(self):
        """Environment steps at the end of each whole iteration, from the console."""
        return [int(step) for step in re.findall(r"step (\d+)/", self.stdout.read_text())]

    def signal(self, signum, whole_group=True):
        self.sent = time.time()
        (os.killpg if whole_group else os.kill)(self.process.pid, signum)

    def assert_ends(self, code, *words, since=None, limit=LIMIT, traceback=False):
        """Exit code, words of the last line, a traceback or none (None: not looked at), in time, nothing left over."""
        assert self.process.wait(START_LIMIT) == code, self.stderr.read_text()
        if since is not None:
            assert time.time() - since < limit
        error = self.stderr.read_text()
        assert traceback is None or ("Traceback" in error) == traceback, error
        assert_words(error.splitlines()[-1] if words else "", *words)
        end = time.monotonic() + LIMIT
        while self.pids():
            assert time.monotonic() < end, f"orphans: {self.pids()}"
            time.sleep(0.05)

    def assert_stops(self, signum, iterations=None):
        """By the signal that was sent, in time; what was reached is saved. `iterations`: that many whole ones."""
        saved = self.steps() if iterations is None else [BATCH * iterations][:iterations]
        words = f"--resume {self.directory}" if saved else ""
        self.assert_ends(128 + signum, f"stopped by {signum.name}", words, since=self.sent, limit=SIGNAL_LIMIT)
        assert (self.directory / "checkpoint.pt").exists() == bool(saved)
        if saved:
            checkpoint = load(self.directory)
            assert checkpoint["global_step"] == self.steps()[-1] == checkpoint["iteration"] * BATCH >= saved[-1]


@pytest.fixture
def start(tmp_path):
    """start(flags, env=..., module=..., VARIABLE=...) -> Process; what is left of it is killed after the test."""
    started = []

    def start(*flags, env="Healthy", module=base, file=None, run_dir=True, sizes=True, **variables):
        directory = tmp_path / f"run{len(started)}"
        args = vars(small_args(module, directory, env=env))
        names = ["run_dir"] if run_dir else []
        names += "env_id num_envs num_steps num_minibatches update_epochs num_workers eval_episodes".split() * sizes
        flags = ["--no-cuda", *(f"--{name.replace('_', '-')}={args[name]}" for name in names), *map(str, flags)]
        started.append(Process(file or module.__file__, directory, flags, variables))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def assert_words(message, *words):
    assert [word for word in words if word not in message] == [], message


def assert_resumes(directory, module=base, iterations=2):
    """The checkpoint is finite and training goes on from it, in a healthy environment."""
    checkpoint = load(directory)
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    total = checkpoint["global_step"] + iterations * BATCH
    changes = {"total_timesteps": total, "env_id": small_args(module, directory).env_id}
    result = module.train(resume_args(module, directory, **changes))
    assert (result["status"], result["global_step"]) == ("finished", total)
    assert result["iterations"] == checkpoint["iteration"] + iterations


def one_line(call, *args):
    """The message of the SystemExit that call raises: one line, without a traceback, and no worker left behind."""
    with pytest.raises(SystemExit) as caught, redirect_stderr(io.StringIO()) as stderr:
        call(*args)
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code, caught.value.code
    assert "Traceback" not in stderr.getvalue(), stderr.getvalue()
    assert multiprocessing.active_children() == []
    return caught.value.code


@pytest.fixture
def run_copy(finished, tmp_path):
    return shutil.copytree(finished(base), tmp_path / "copy")


# Environments and the processes that step them. What five scripts share is tested in one of them.

each_text = scripts(*{str(text(module)): module for module in reversed(SCRIPTS.values())}.values())
FAULTS = {
    "RaiseInConstructor": "environment 0 raised RuntimeError: no such robot",
    "RaiseInStep": "environment 3 raised RuntimeError: the leg is broken",
    "RaiseInReset": "environment 3 raised RuntimeError: can't get up",
    "KilledInStep": "the process of environments 2 to 3 died with exit code -9",
    "ExitInStep": "the process of environments 2 to 3 died with exit code 3",
    "ObservationNotFinite": "environment 3 returned an observation that is not finite",
    "FinalObservationNotFinite": "environment 3 returned an observation that is not finite",
    "RewardNotFinite": "environment 3 returned a reward that is not finite",
}


@scripts(base, recurrent)
def test_fault_in_an_environment_is_reported_and_nothing_is_lost(start, module):
    env, words = "RaiseInStep", "environment 1 raised RuntimeError: the leg is broken"
    if module is recurrent:
        env, words = "ExitInStep", "the process of environments 0 to 1 died with exit code 3"
    run = start("--checkpoint-interval=0", "--total-timesteps=64000", env=env, module=module)
    run.wait_until(lambda: run.events("fault"))
    raised, at = "Raise" in env, min(at for _, at in run.events("fault"))
    run.assert_ends(1, words, f"--resume {run.directory}", traceback=raised, since=at)
    if raised:  # the environment's own
        assert "misbehaving.py" in run.stderr.read_text()
    checkpoint = load(run.directory)
    assert checkpoint["global_step"] == run.steps()[-1] == checkpoint["iteration"] * BATCH >= 2 * BATCH
    assert_resumes(run.directory, module)


@each_text
@pytest.mark.parametrize("env", FAULTS)
def test_every_fault_ends_in_its_line(module, env):
    make_env = partial(gym.make, f"misbehaving:{env}-v0")
    with pytest.raises(SystemExit) as caught, module.SubprocVecEnv(make_env, 4, 2, 1, (FLOATS, ACTIONS)) as envs:
        envs.reset()
        for _ in range(200):
            envs.step(np.zeros((4, 2)), np.arange(4) > 1)
    *lines, last = str(caught.value).splitlines()
    assert last.startswith(FAULTS[env])
    assert any("misbehaving.py" in line for line in lines) == env.startswith("Raise")  # the environment's own traceback
    assert multiprocessing.active_children() == []


@scripts(flagship, recurrent)
def test_a_half_is_not_blamed_for_the_other_one_which_is_under_way(module):
    make_env = partial(gym.make, "misbehaving:FinalObservationNotFinite-v0", max_episode_steps=1000)
    with module.SubprocVecEnv(make_env, 4, 2, 1) as envs:
        envs.reset()
        for _ in range(FAULT_STEP - 1):
            envs.step(np.zeros((4, 2)))
        even, odd = slice(0, None, 2), slice(1, None, 2)  # the odd ones fail
        for rows in even, odd:
            envs.send(np.zeros((2, 2)), rows=rows)
        while np.isfinite(envs.final_obs[odd]).all():
            time.sleep(0.01)
        envs.receive(even)
        with pytest.raises(SystemExit, match="environment 1 returned an observation that is not finite in float32"):
            envs.receive(odd)


ACTIONS = gym.spaces.Box(-1, 1, (2,))
FLOATS, DOUBLES = gym.spaces.Box(-np.inf, np.inf, (3,)), gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
LONGS, BYTES = gym.spaces.Box(-9, 9, (3,), np.int64), gym.spaces.Box(0, 255, (3,), np.uint8)


def fault(module, make_env):
    """The message about one of three environments that are played to the end of an episode."""
    with pytest.raises(SystemExit) as caught, module.SubprocVecEnv(make_env, 3, 2, 1) as envs:
        envs.reset()
        for _ in range(3):
            envs.step(np.zeros((3, 2)))
    assert "\n" not in str(caught.value), str(caught.value)
    return str(caught.value)


@each_text
@pytest.mark.parametrize(
    "when, space, obs, words",
    [
        ("reset", LONGS, [0.5, 0.9, -0.9], ["int64", "(3,)", "0.5, 0.9, -0.9"]),
        ("end", LONGS, [np.nan] * 3, ["int64", "nan"]),
        ("reset", BYTES, [-1, 0, 0], ["uint8", "-1, 0, 0"]),
        ("step", BYTES, [300, 0, 0], ["uint8", "300, 0, 0"]),
        ("step", FLOATS, 0.5, ["(3,)", ": 0.5"]),
        ("end", FLOATS, [0.5], ["(3,)", ": [0.5]"]),
        ("step", FLOATS, [[0.5] * 3] * 2, ["(3,)", "[[0.5, 0.5, 0.5]"]),
        ("step", FLOATS, None, ["(3,)", "None"]),
        ("step", FLOATS, ["a", "b", "c"], ["(3,)", "'a', 'b', 'c'"]),
        ("step", DOUBLES, [1e300] * 3, ["not finite in float32"]),
    ],
    ids=str,
)
def test_observation_that_its_space_can_not_hold_is_named(module, when, space, obs, words):
    message = fault(module, partial(Constant, space, obs, when))
    assert_words(message, "environment 0 returned an observation ", *words)


@each_text
@pytest.mark.parametrize("reward, word", [([1.0, 2.0], "[1.0, 2.0]"), ([], "[]"), (None, "None"), ("much", "much")])
def test_reward_that_is_no_number_is_named(module, reward, word):
    message = fault(module, partial(Constant, FLOATS, [0.5] * 3, reward=reward))
    assert_words(message, "environment 0 returned a reward ", "no float32 of shape ()", word)


@each_text
@pytest.mark.parametrize(
    "reward",
    [1, True, [1.0], np.float16(2047), np.int64([[1]]), torch.tensor([1.0])],
    ids=repr,
)
def test_every_kind_of_number_is_a_reward_and_returns_are_exact(module, reward):
    """A sum in float16 would be 6140."""
    with module.SubprocVecEnv(partial(Constant, FLOATS, [0.5] * 3, reward=reward), 1, 1, 1) as envs:
        envs.reset()
        rewards = [envs.step(np.zeros((1, 2)))[1].item() for _ in range(3)]
        assert rewards == [np.asarray(reward).item()] * 3 and repr(envs.episodes) == f"[(0, {sum(rewards)}, 3)]"


@each_text
def test_actions_are_inside_the_bounds_in_the_spaces_own_type(module):
    """The environment asserts it; the float32 that are nearest to its bounds lie outside of them."""
    with module.SubprocVecEnv(partial(gym.make, "misbehaving:DoubleActions-v0"), 2, 1, 1) as envs:
        space = envs.single_action_space
        assert not space.contains(space.high.astype(np.float32).astype(np.float64))
        envs.reset()
        for action in (space.low.astype(np.float32), space.high.astype(np.float32), [9, 9], [-np.inf, np.inf]):
            envs.step(np.stack([action, action]))


ODD = """ByteObservation LongDoubleObservation TinyImageObservation MatrixObservation DictObservation
DiscreteObservation
RaiseInClose ChildProcess Bare Counting OneInfo OwnEpisodes CountedTwice DoubleActions""".split()


@few(base, recurrent)
@pytest.mark.parametrize("env", ODD)
def test_odd_environments_are_trained_and_their_returns_are_the_true_ones(tmp_path, capsys, module, env):
    result = module.train(small_args(module, tmp_path / "run", 2, env, eval_episodes=2))
    assert (result["status"], len(result["eval_returns"])) == ("finished", 2)
    if env in ("Counting", "OneInfo", "OwnEpisodes", "CountedTwice"):
        assert load(tmp_path / "run")["recent_returns"] == 4 * (2 * 16 // 7) * [7.0]
        assert result["eval_returns"] == [7.0, 7.0]
    sizes = {"TinyImageObservation": 147, "MatrixObservation": 6, "DictObservation": 9, "DiscreteObservation": 2}
    said = f"are flattened to ({sizes.get(env)},)"
    first_line = capsys.readouterr().out.splitlines()[0]
    assert (said in first_line) == (env in sizes) and (f"{env}-v0" in first_line) == (env in sizes)


@every
def test_whole_numbers_as_observations_train_without_normalisation_too(module, tmp_path):
    args = small_args(module, tmp_path / "run", 2, "ByteObservation", norm_obs=False)
    assert module.train(args)["status"] == "finished"


@few(base)
def test_environments_of_the_file_that_is_run_are_found_in_its_processes(start, tmp_path, module):
    file, main = tmp_path / "mine.py", 'if __name__ == "__main__":\n'
    spec = f"'Mine-v0', misbehaving.Counting, max_episode_steps=20, kwargs={{'discrete': {module is recurrent}}}"
    own = f"import misbehaving\n\ngym.register({spec})\n\n\n"
    file.write_text(Path(module.__file__).read_text().replace(main, own + main))
    run = start("--env-id=Mine-v0", "--total-timesteps=64", file=file, module=module, MUJOCO_GL="bogus")
    run.assert_ends(0)  # without OpenGL, as nothing is rendered
    assert set(load(run.directory)["recent_returns"]) == {7.0}


@every
def test_id_that_only_this_process_knows_is_one_line_that_says_how(module, tmp_path, monkeypatch):
    """As in a notebook."""
    registry = {"OnlyHere-v0": gym.registry["Discrete" * (module is recurrent) + "Healthy-v0"]}
    monkeypatch.setattr(gym.envs.registration, "registry", gym.registry | registry)
    message = one_line(module.train, small_args(module, tmp_path / "run", env_id="OnlyHere-v0"))
    assert_words(message, "OnlyHere-v0", "notebook", "module")


@pytest.mark.parametrize("quota, processes", [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("", 4)])
def test_a_worker_for_each_core_that_this_process_may_use(monkeypatch, quota, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(Path, "read_text", lambda path: quota if str(path) == "/sys/fs/cgroup/cpu.max" else 1 / 0)
    with base.SubprocVecEnv(partial(gym.make, "misbehaving:Healthy-v0"), 8, 0, 1) as envs:
        assert len(envs.workers) == processes
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    with base.SubprocVecEnv(partial(gym.make, "misbehaving:Healthy-v0"), 8, 0, 1) as envs:
        assert len(envs.workers) == processes


def test_environment_whose_constructor_raises_is_reported(start):
    run = start(env="RaiseInConstructor")
    run.assert_ends(1, "misbehaving:RaiseInConstructor-v0", "RuntimeError", "no such robot", traceback=True)


@pytest.mark.parametrize("env", [pytest.param("Healthy", marks=pytest.mark.slow), "HangInStep"])
def test_killed_parent_leaves_no_process(start, env):
    run = start(*ENDLESS, env=env)
    run.wait_until(lambda: run.steps() if env == "Healthy" else run.events("fault"))
    assert len(run.pids()) >= 4  # the parent, the fork server, two workers
    run.process.kill()
    run.assert_ends(-signal.SIGKILL, traceback=None)


# Signals


@few(recurrent)
def test_signal_saves_the_last_whole_iteration(start, module):
    run, signum = start(*ENDLESS, module=module), signal.SIGTERM if module is recurrent else signal.SIGINT
    run.wait_until(lambda: len(run.steps()) >= 2)
    run.signal(signum, whole_group=signum == signal.SIGINT)
    run.assert_stops(signum)
    assert_resumes(run.directory, module)


def test_signal_sent_twice_at_once_raises_once(tmp_path):
    """As timeout(1) does: once to the process and once to its group."""
    ignored = False
    with pytest.raises(SystemExit) as end, base.Run(small_args(base, tmp_path / "run")) as run:
        run.begin(SPACES, model=torch.nn.Linear(1, 1))
        with suppress(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        ignored = True
        run.count(1, [])
    assert ignored and end.value.code == 143 and load(tmp_path / "run")["iteration"] == 0


@few(base)
@pytest.mark.parametrize("at, count", [("add_scalar", 60), ("flush", 3)])
def test_signal_inside_the_curve_writers_queue_does_not_hang_the_end(tmp_path, monkeypatch, module, at, count):
    """Raised there it can leave a lock taken, for which closing the writer would wait for ever."""
    calls, write = itertools.count(), getattr(module.SummaryWriter, at)

    def signal_inside(writer, *arguments):
        if next(calls) == count:
            writer.file_writer.event_writer._async_writer._byte_queue.mutex.acquire()
            os.kill(os.getpid(), signal.SIGTERM)
        write(writer, *arguments)

    monkeypatch.setattr(module.SummaryWriter, at, signal_inside)
    start = time.monotonic()
    with pytest.raises(SystemExit) as end:
        module.train(small_args(module, tmp_path / "run", 20, checkpoint_interval=1))
    assert end.value.code == 128 + signal.SIGTERM and next(calls) == count + 1
    assert time.monotonic() - start < 60
    assert_resumes(tmp_path / "run", module)


@few(recurrent)
def test_signal_while_a_step_hangs_saves_the_last_whole_iteration(start, module):
    run = start(*ENDLESS, env="HangInStep", module=module)
    run.wait_until(lambda: run.events("fault"))
    run.signal(signal.SIGINT)
    run.assert_stops(signal.SIGINT, iterations=2)


def test_second_interrupt_ends_the_run_all_the_same(start):
    run = start(*ENDLESS, env="HangInStep")
    run.wait_until(lambda: run.events("fault"))
    run.signal(signal.SIGINT)
    time.sleep(1)  # the first one gives the worker that hangs two seconds to end
    run.signal(signal.SIGINT)
    run.assert_stops(signal.SIGINT, iterations=2)


@few(flagship)
def test_signal_in_an_evaluation_ends_the_run(start, module):
    run = start(*ENDLESS, "--eval-interval=1", "--eval-episodes=1000000", module=module)
    run.wait_until(lambda: len(run.events("made")) == 1 + 4 + 4)
    time.sleep(0.5)
    run.signal(signal.SIGINT)
    run.assert_stops(signal.SIGINT, iterations=1)


@pytest.mark.parametrize(
    "flags, env, made",
    [
        ([], "Healthy", 1),  # while the fork server imports
        (["--num-envs=8", "--num-workers=8"], "HangInConstructor", 9),
        pytest.param([], "SlowStep", 5, marks=pytest.mark.slow),
        ([], "ChildProcess", 5),
    ],
)
def test_signal_in_the_first_iteration_ends_the_run(start, flags, env, made):
    run = start(*ENDLESS, "--num-steps=16384", *flags, env=env)
    run.wait_until(lambda: len(run.events("made")) == made)
    if begun := made > 1:
        run.wait_until(lambda: (run.directory / "checkpoint.pt").exists())
    time.sleep(0.2)
    run.signal(signal.SIGINT)
    words = "stopped by SIGINT", f"--resume {run.directory}" if begun else ""
    run.assert_ends(130, *words, since=run.sent, limit=SIGNAL_LIMIT)
    assert not begun or load(run.directory)["iteration"] == 0 and run.steps() == []


@pytest.mark.slow
@scripts(base, flagship)
@pytest.mark.parametrize("seconds", [2, 4, 6])
def test_signal_while_the_update_is_compiled_ends_the_run(start, tmp_path, module, seconds):
    run = start("--compile", module=module, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    run.wait_until(lambda: (run.directory / "checkpoint.pt").exists())
    time.sleep(seconds)
    assert run.steps() == []
    run.signal(signal.SIGINT)
    words = "stopped by SIGINT", f"--resume {run.directory}"
    run.assert_ends(130, *words, since=run.sent, limit=SIGNAL_LIMIT)
    assert load(run.directory)["iteration"] == 0  # the checkpoint of the run's start


COMPILER = """
def compiler(*inputs):
    try:
        calls.append(len(calls))
        if calls[-1] == 8:  # of 4 an iteration
            os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        os.abort()
    return gradient(*inputs)
"""
COMPILED_RUN = f"""
import os, pathlib, signal, sys
import conftest, ppo_mlp_gaussian as base
calls, gradient = [], base.minibatch_gradient
exec(compile({COMPILER!r}, "torch/_dynamo/any.py", "exec"))
base.minibatch_gradient = compiler
base.train(conftest.small_args(base, pathlib.Path(sys.argv[1])))
"""


def test_signal_in_torchs_compiler_leaves_without_an_exception(tmp_path):
    """Its C++ code calls Python and aborts the process when an exception comes back."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-c", COMPILED_RUN, str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert re.fullmatch(r"\nstopped by SIGTERM; go on with: .*\n", done.stderr), done.stderr
    assert load(tmp_path / "run")["iteration"] == 2


SPACES = types.SimpleNamespace(single_observation_space=FLOATS, single_action_space=FLOATS)


def play(args):
    """A run as `train` makes one, of a model whose only parameter counts the iterations."""
    model, metrics = torch.nn.Linear(1, 1, bias=False), {"losses/value_loss": torch.tensor(1.0)}
    torch.nn.init.zeros_(model.weight)
    with base.Run(args) as run:
        run.begin(SPACES, model=model)
        while run.global_step < run.budget:
            run.count(BATCH, [(0, 1.0, 1)])
            model.weight.data += 1
            run.end_iteration(metrics, time.perf_counter() - 2, time.perf_counter() - 1)
        run.finish([], [])


@pytest.mark.parametrize("function", "begin _take_snapshot end_iteration _write finish".split())
@pytest.mark.parametrize("begin", ["fresh", "resumed"])
def test_signal_at_whatever_line_of_a_run_leaves_a_whole_checkpoint(tmp_path, function, begin):
    play(small_args(base, tmp_path / "before", 2, checkpoint_interval=0))
    keys, sent, code = load(tmp_path / "before").keys(), None, getattr(base.Run, function).__code__

    def trace(frame, event, _):
        nonlocal left, reached
        if event == "line":
            left -= 1
            if left == 0:
                snapshot = frame.f_locals["self"].snapshot
                reached = snapshot["iteration"] if snapshot else 2 if begin == "resumed" else None
                os.kill(os.getpid(), signal.SIGINT)
        return trace if frame.f_code is code else None

    for line in itertools.count(1):
        directory, left, reached = tmp_path / str(line), line, None
        args = small_args(base, directory, 2, checkpoint_interval=0)
        if begin == "resumed":
            shutil.copytree(tmp_path / "before", directory)
            args = resume_args(base, directory, total_timesteps=4 * BATCH)
        sys.settrace(trace)
        try:
            play(args)
        except SystemExit as stopped:
            sent = stopped.code
        finally:
            sys.settrace(None)
        if left > 0:
            break
        assert sent == 130
        assert (directory / "checkpoint.pt").exists() == (reached is not None)
        if reached is not None:
            checkpoint = load(directory)
            assert checkpoint.keys() == keys
            counts = checkpoint["global_step"] / BATCH, checkpoint["iteration"], checkpoint["model"]["weight"].item()
            assert set(counts) == {reached}
    assert line > 3  # it has been there


# Checkpoints

KILLER = """
import os, signal, torch
import ppo_mlp_gaussian as script

save, replace = torch.save, os.replace

def killing_save(state, stream):
    if state["iteration"] == 3:
        stream.write(b"half a checkpoint")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, stream)

def killing_replace(source, target):
    if str(target).endswith("checkpoint.pt") and torch.load(source, weights_only=True)["iteration"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

if __name__ == "__main__":
    WHERE
    script.train(script.parse_args(script.Args()))
"""


@pytest.mark.parametrize(
    "where", [pytest.param("torch.save = killing_save", marks=pytest.mark.slow), "os.replace = killing_replace"]
)
def test_kill_while_a_checkpoint_is_written_leaves_the_one_before(start, tmp_path, where):
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER.replace("WHERE", where))
    run = start("--checkpoint-interval=1", "--total-timesteps=640", file=killer)
    run.assert_ends(-signal.SIGKILL)
    assert load(run.directory)["iteration"] == 2
    assert_resumes(run.directory)


@pytest.mark.parametrize("content", ["half", "text", "empty", "pickle", "list", "other dict", "none", "nowhere"])
def test_what_is_no_checkpoint_is_one_line(monkeypatch, run_copy, content):
    file = run_copy / "checkpoint.pt"
    if content in ("half", "text", "empty"):
        file.write_bytes({"half": file.read_bytes()[:5000], "text": b"hello\n", "empty": b""}[content])
    if content in ("pickle", "list", "other dict"):
        other = {"pickle": {"args": Path("/"), "model": {}}, "list": [1, 2], "other dict": {"args": {}}}
        torch.save(other[content], file)
    if content in ("none", "nowhere"):
        file.unlink() if content == "none" else shutil.rmtree(run_copy)
    message = one_line(parse, monkeypatch, base, "--resume", run_copy)
    assert_words(message, f"--resume {run_copy}", "missing" if content in ("none", "nowhere") else "broken")


@scripts(base, value_first, adaptive)
def test_what_does_not_fit_is_one_line_and_changes_nothing(monkeypatch, finished, module):
    directory = finished(module)
    before = files(directory)
    for flags in (["--no-norm-obs"], ["--env-id", "Pendulum-v1"], ["--env-id", "misbehaving:MatrixObservation-v0"]):
        args = parse(monkeypatch, module, "--resume", directory, "--total-timesteps", 8 * BATCH, *flags)
        changed = [f"{flags[0].replace('no-', '')} was "]  # which says why
        assert_words(one_line(module.train, args), f"--resume {directory} does not fit; ", "RuntimeError", *changed)
    args = parse(monkeypatch, flagship, "--resume", directory, "--total-timesteps", 8 * BATCH, "--preset", "default")
    words = f"--resume {directory} does not fit; ", "RuntimeError"
    words = ["a resume keeps the run's flags"] if module is adaptive else words  # its run has a preset
    assert_words(one_line(flagship.train, args), *words)
    assert files(directory) == before


@every
def test_every_flag_may_be_given_anew_and_what_follows_is_said(monkeypatch, tmp_path, finished, capsys, module):
    directory = shutil.copytree(finished(module), tmp_path / "copy")
    flags = {"learning_rate": 2e-3, "total_timesteps": 5 * BATCH, "gamma": 0.9, "num_steps": 32, "seed": 2}
    flags |= {"num_workers": 1, "eval_episodes": 1, "env_id": small_args(module, "", env="Counting").env_id}
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items()]
    args = parse(monkeypatch, module, "--resume", directory, *itertools.chain(*pairs))
    old = load(directory)["args"]
    capsys.readouterr()
    result = module.train(args)
    assert (result["global_step"], result["iterations"], len(result["eval_returns"])) == (5 * BATCH, 4, 1)
    changed = {name: [old[name], value] for name, value in flags.items()}
    first, second = load(directory)["starts"]
    assert (second["global_step"], second["changed"]) == (3 * BATCH, changed) and first["changed"] == {}
    output = capsys.readouterr().out
    assert_words(output, *(f"{name} was {old[name[2:].replace('-', '_')]}, is {value}" for name, value in pairs))
    was, now = (x.learning_rate * module.annealing(x, 3 * BATCH) for x in (types.SimpleNamespace(**old), args))
    assert f"the annealed --learning-rate was {was:.3g}, is {now:.3g}" in output
    if old["anneal_lr"]:  # it was at its end
        assert was == 0 and now == pytest.approx(2e-3 * 2 / 5)


@scripts(base, flagship)
def test_changed_copy_goes_on_with_the_runs_of_the_original_and_it_with_them(monkeypatch, tmp_path, finished, module):
    directory = shutil.copytree(finished(module), tmp_path / "copy")
    field = '@dataclass\nclass Args:\n    new_flag: float = 0.5\n    """a new one"""\n'
    text = Path(module.__file__).read_text().replace("@dataclass\nclass Args:\n", field)
    text += "    pass\nplain = annealing\nannealing = lambda args, step: args.new_flag * plain(args, step)\n"
    (tmp_path / f"my_{module.__name__}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module(f"my_{module.__name__}")
    flags = "--resume", directory, "--total-timesteps"
    result = mine.train(parse(monkeypatch, mine, *flags, 4 * BATCH, "--new-flag", 0.7))
    assert (result["script"], result["iterations"], result["args"]["new_flag"]) == (f"my_{module.__name__}", 4, 0.7)
    assert parse(monkeypatch, mine, *flags, 5 * BATCH).new_flag == 0.7
    result = module.train(parse(monkeypatch, module, *flags, 5 * BATCH))
    assert (result["script"], result["iterations"]) == (module.__name__, 5)
    assert [list(start["changed"]) for start in result["starts"]] == [
        [],
        ["new_flag", "total_timesteps"],
        ["total_timesteps"],
    ]


def test_run_directory_that_can_not_be_used_is_one_line_and_not_touched(monkeypatch, finished, tmp_path):
    before = files(finished(base))
    message = one_line(base.train, small_args(base, finished(base)))
    assert_words(message, f"--run-dir {finished(base)} holds a run", "--resume")
    other = Path(shutil.copytree(finished(base), tmp_path / "other"))  # a resumed run writes over none either
    message = one_line(base.train, resume_args(base, finished(base), total_timesteps=4 * BATCH, run_dir=str(other)))
    assert_words(message, f"--run-dir {other} holds a run")
    assert files(finished(base)) == before and load(other)["iteration"] == 3
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file" / "run") in one_line(base.train, small_args(base, tmp_path / "file" / "run"))


def test_run_has_a_checkpoint_before_anything_else(monkeypatch, tmp_path):
    """So a signal in its first moments loses nothing, and can be resumed."""

    def stop(*_, **__):
        raise SystemExit("stopped here")

    monkeypatch.setattr(base, "SummaryWriter", stop)
    message = one_line(base.train, small_args(base, tmp_path / "run"))
    assert_words(message, "stopped here; go on with: ", f"--resume {tmp_path / 'run'}")
    assert load(tmp_path / "run")["iteration"] == 0


@pytest.mark.parametrize("flag", ["exp_name", "run_dir", "resume"])
def test_name_that_is_too_long_is_one_line(monkeypatch, tmp_path, flag):
    monkeypatch.chdir(tmp_path)
    args = small_args(base, "", **{"run_dir": None, flag: "x" * 300})
    assert_words(one_line(base.train, args), "x" * 300, "missing" if flag == "resume" else "OSError")


def test_curves_of_an_iteration_are_on_disk_before_its_checkpoint(monkeypatch, tmp_path):
    """So a resume from it has no gap in them, however the run ended."""
    saved = []
    monkeypatch.setattr(base.SummaryWriter, "flush", lambda writer: saved.append(load(tmp_path / "run")["iteration"]))
    play(small_args(base, tmp_path / "run", checkpoint_interval=1))
    assert saved[:3] == [0, 1, 2]


FULL = """
import errno, itertools, os
from tensorboard.summary.writer.record_writer import RecordWriter
import ppo_mlp_gaussian as script

left, write = itertools.count(), RecordWriter.write

def full_write(*inputs):
    if next(left) >= COUNT:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(*inputs)

if __name__ == "__main__":
    RecordWriter.write = full_write
    script.train(script.parse_args(script.Args()))
"""


@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.slow), 70])
def test_curves_that_can_not_be_written_cost_no_checkpoint(start, tmp_path, count):
    file = tmp_path / "full.py"
    file.write_text(FULL.replace("COUNT", str(count)))
    run = start("--total-timesteps=640000", "--checkpoint-interval=0", file=file)
    run.assert_ends(1, "No space left on device", *([f"--resume {run.directory}"] if count else []))
    if count:
        assert load(run.directory)["iteration"] == len(run.steps()) >= 1
        assert_resumes(run.directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_full_disk_is_one_line_and_leaves_a_whole_checkpoint(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("can't mount a file system")
    try:
        run = start(f"--run-dir={disk / 'run'}", "--total-timesteps=640000", "--checkpoint-interval=5", run_dir=False)
        run.assert_ends(1, "No space left on device", f"--resume {disk / 'run'}")
        shutil.copytree(disk / "run", tmp_path / "elsewhere")
    finally:
        subprocess.run(["umount", "-l", disk])
    assert_resumes(tmp_path / "elsewhere")


# Divergence


@every
@pytest.mark.parametrize("change", [{"env": "EnormousRewards"}, {"learning_rate": 1e30}], ids=str)
def test_divergence_keeps_the_last_good_checkpoint(module, change, tmp_path):
    if module is recurrent and "env" in change or module is adaptive:
        pytest.skip("rewards are clipped, or the learning rate adapts")
    directory = tmp_path / "run"
    args = small_args(module, directory, 10, norm_reward=False, num_minibatches=1, update_epochs=1, **change)
    assert_words(one_line(module.train, args), "diverged at step", "--learning-rate")
    result, checkpoint = json.loads((directory / "result.json").read_text()), load(directory)
    assert result["status"] == "diverged"
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert checkpoint["iteration"] == result["iterations"] >= 1
    if "env" in change:
        assert checkpoint["iteration"] == 2
        assert_resumes(directory, module)


def test_divergence_in_the_first_iteration_leaves_the_beginning(tmp_path):
    args = small_args(base, tmp_path / "run", env="EnormousRewardsAtOnce", norm_reward=False)
    message = one_line(base.train, args)
    assert_words(message, "diverged at step 64", "--learning-rate")
    assert load(tmp_path / "run")["iteration"] == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "diverged"
    again = resume_args(base, tmp_path / "run", env_id="misbehaving:Healthy-v0")
    assert base.train(again)["status"] == "finished"


def test_parameters_alone_that_are_not_finite_are_divergence(tmp_path):
    model, now = torch.nn.Linear(1, 1), 0.0
    with pytest.raises(SystemExit, match="diverged"), base.Run(small_args(base, tmp_path / "run")) as run:
        run.begin(SPACES, model=model)
        run.count(BATCH, [])
        model.weight.data *= float("nan")
        run.end_iteration({"losses/value_loss": torch.tensor(1.0)}, now, now + 1)
    assert load(tmp_path / "run")["model"]["weight"].isfinite().all()


def test_rewards_near_the_largest_float_do_not_poison_the_checkpoint(tmp_path):
    with suppress(SystemExit):
        base.train(small_args(base, tmp_path / "run", 10, "LargestRewards"))
    assert all(tensor.isfinite().all() for tensor in load(tmp_path / "run")["return_norm"].values())


# Spaces, ids, sizes, flags, and what is not installed


@pytest.mark.parametrize(
    "env, words, modules",
    [
        ("DiscreteAction", ["action", "Discrete(3)", "ppo_value_first.py"], [base, flagship, comb, adaptive]),
        ("BinaryActions", ["action", "MultiBinary(2)"], CONTINUOUS),
        ("WholeNumberActions", ["action", "int64", "floats"], CONTINUOUS),
        ("InfiniteBounds", ["action", "finite", "inf"], [flagship, comb]),
        ("EqualBounds", ["action", "low < high"], [flagship, comb]),
        ("ImageObservation", ["(36, 40, 3)", "ppo_lstm_atari.py"], CONTINUOUS),
        ("EmptyObservation", ["(0,)"], SCRIPTS.values()),
        ("ListObservation", ["Sequence", "wrapper"], SCRIPTS.values()),
        ("OwnSpaceObservation", ["OwnSpace", "can't be made a vector", "wrapper"], SCRIPTS.values()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@every
def test_spaces_that_the_script_can_not_drive_are_named(tmp_path, module, env, words, modules):
    if module not in modules:
        pytest.skip("it can")
    args = small_args(module, tmp_path / "run", env=env)
    assert_words(one_line(module.train, args), args.env_id, *words)
    assert not (tmp_path / "run").exists()


def test_infinite_action_bounds_are_fine_for_a_gaussian_unless_it_needs_them(tmp_path):
    assert base.train(small_args(base, tmp_path / "run", env="InfiniteBounds"))["status"] == "finished"
    for change in ({"scale_actions": True}, {"fixed_std": 0.05}):
        message = one_line(base.train, small_args(base, tmp_path / "other", env="InfiniteBounds", **change))
        assert_words(message, "finite action bounds", "--scale-actions and --fixed-std")


@every
@pytest.mark.parametrize(
    "env_id", ["no_such_module:X-v0", "misbehaving:NoSuch-v0", "HalfCheeta-v5", "Pendulum-v99", "?", ""]
)
def test_every_kind_of_unknown_id_is_one_line(tmp_path, module, env_id):
    message = one_line(module.train, small_args(module, tmp_path / "run", env_id=env_id))
    assert f"--env-id {env_id}" in message and ("HalfCheetah" in message) == (env_id == "HalfCheeta-v5")
    assert not (tmp_path / "run").exists()


def test_missing_humanoid_bench_is_one_line(start, tmp_path):
    package = tmp_path / "stub" / "humanoid_bench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no module of that name here')\n")
    run = start("--env-id=h1hand-walk-v0", sizes=False, module=flagship, PYTHONPATH=[str(package.parent)])
    run.assert_ends(1, "--env-id h1hand-walk-v0", "HumanoidBench", "install")


IMPOSSIBLE = {  # a flag, a value, and more words of the line that names both
    "base": """
        num_envs 0 | num_steps -16 | num_steps 0 | num_minibatches 0 | update_epochs 0 | num_workers -1 | seed -1
        checkpoint_interval -1 | eval_episodes -1 | seed 18446744073709551616 | fixed_std 0.0 bounds
        num_minibatches 3 64 equal parts | num_minibatches 64 2 or more | num_minibatches 128 | total_timesteps 63 64
        total_timesteps -1 | total_timesteps 0 --resume | capture_video True --eval-episodes | gamma 1.5 from 0 to 1
        gae_lambda nan from 0 to 1 | learning_rate -1.0 from 0 | clip_coef -0.1 | max_grad_norm -0.5
        target_kl -1.0 from 0 | target_kl nan from 0""",
    "adaptive": "value_learning_rate -1.0 | num_minibatches 3 64 equal parts",
    "flagship": """
        num_envs 0 | window 0 | hidden_size 0 | init_std 0.6 | init_std 1e-07 | reward_scale 0.0 | reward_scale inf
        init_gamma 1.5 from 0 to 1 | beta_head beta mode, alpha | preset Paper default, paper""",
    "comb": "num_teeth 1 | density quadratic linear as-coded",
    "value-first": """
        order policy-first joint, phases, value-first | critic vector scalar, support | support_atoms 1
        support_min 110.0 --support-max 110.0 | support_min -inf finite | support_max inf finite""",
}


@pytest.mark.parametrize(
    "name, line", [(name, x.strip()) for name, x in IMPOSSIBLE.items() for x in re.split(r"[|\n]", x) if x.strip()]
)
def test_impossible_sizes_are_named(tmp_path, name, line):
    (flag, value, *words), module = line.split(), SCRIPTS[name]
    kind = type(getattr(module.Args(), flag))
    args = small_args(module, tmp_path / "run", **{flag: value if kind is str else eval(value, {**vars(np)})})
    shown = [f"--{flag.replace('_', '-')}", *([] if value == "True" else [value])]
    assert_words(one_line(module.train, args), *shown, *words)
    assert not (tmp_path / "run").exists()


@every
def test_budget_that_whole_iterations_do_not_use_up_is_printed(tmp_path, capsys, module):
    result = module.train(small_args(module, tmp_path / "run", total_timesteps=2 * BATCH + 10))
    assert result["global_step"] == 2 * BATCH
    assert "up to step 128 of 138" in capsys.readouterr().out.splitlines()[0]


def test_runs_of_one_name_have_a_directory_each(tmp_path):
    """Begun side by side, in the same second or not."""
    args = small_args(base, tmp_path, run_dir=None)
    with base.Run(args) as one, base.Run(args) as other:
        assert one.directory != other.directory
        assert re.fullmatch(r"runs/misbehaving-Healthy-v0__ppo_mlp_gaussian__1__\d+\.\d{6}", str(one.directory))


@scripts(base, flagship)
@pytest.mark.parametrize("flags", [["--no-such-flag", "1"], ["--num-envs", "four"], ["--resume"]], ids=" ".join)
def test_unknown_flag_or_value_exits_with_2(monkeypatch, capsys, module, flags):
    with pytest.raises(SystemExit) as caught:
        parse(monkeypatch, module, *flags)
    assert caught.value.code == 2
    assert flags[-1] in capsys.readouterr().err


def test_without_opengl_an_unknown_id_is_one_line(start):
    """The flagship looks for it in HumanoidBench, whose import of MuJoCo fails then."""
    start("--env-id=Typo-v0", module=flagship, MUJOCO_GL="bogus").assert_ends(1, "--env-id Typo-v0", "NameNotFound")
    start("--env-id=h1-walk-v0", module=flagship, MUJOCO_GL="bogus").assert_ends(1, "HumanoidBench", "MUJOCO_GL")


def test_video_without_rendering_is_one_line(start):
    run = start("--env-id=InvertedPendulum-v5", "--capture-video", "--eval-episodes=1", MUJOCO_GL="disabled")
    # Gymnasium's viewer, half made, complains as it is thrown away.
    run.assert_ends(1, "MUJOCO_GL=egl", "libosmesa6", traceback=None)


@pytest.mark.parametrize(
    "reason",
    [AttributeError(f"no attribute '{name}'") for name in ("glGetError", "eglQueryString")]
    + [ImportError("no EGL"), RuntimeError("MUJOCO_GL: bogus")],
)
def test_missing_opengl_is_not_blamed_on_the_environment(monkeypatch, reason):
    def make(*_, **__):
        raise reason

    monkeypatch.setattr(gym, "make", make)
    assert_words(one_line(base.gym_make, "HalfCheetah-v5"), str(reason), "MUJOCO_GL=egl", "libosmesa6")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    reason = AttributeError("no attribute 'global_state'")
    assert "MUJOCO_GL" not in str(pytest.raises(SystemExit, base.gym_make, "HalfCheetah-v5").value)


@pytest.mark.filterwarnings("ignore:.*render_mode")
@every
def test_video_of_an_environment_that_draws_nothing_is_one_line(module, tmp_path):
    message = one_line(module.train, small_args(module, tmp_path / "run", capture_video=True, eval_episodes=1))
    assert_words(message, small_args(module, "").env_id, "render_mode rgb_array")
    assert not (tmp_path / "run").exists()


@every
def test_compiling_without_a_compiler_is_one_line(module, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    message = one_line(module.train, small_args(module, tmp_path / "run", compile=True))
    assert_words(message, "--compile", "C++", "CXX")


def test_tracking_without_wandb_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "wandb" in one_line(base.train, small_args(base, tmp_path / "run", track=True))


@few(base)
def test_resumed_run_goes_on_with_its_curves_at_weights_and_biases(tmp_path, monkeypatch, module):
    calls = []

    def init(**given):
        calls.append(given)
        return types.SimpleNamespace(id=given["id"] or f"made{len(calls)}")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for name in ("one", "two"):
        module.train(small_args(module, tmp_path / name, 1, track=True))
    module.train(resume_args(module, tmp_path / "one", total_timesteps=2 * BATCH))
    first, other, resumed = calls
    assert (first["id"], other["id"], resumed["id"]) == (None, None, "made1")
    module.train(resume_args(module, tmp_path / "one", total_timesteps=3 * BATCH, run_dir=str(tmp_path / "new")))
    assert calls[-1]["id"] is None  # another directory is another run
    assert all(call["resume"] == "allow" and call["sync_tensorboard"] for call in calls)
