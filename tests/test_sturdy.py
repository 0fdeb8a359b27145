"""What can go wrong around a run: each case ends soon, with one line that says what to do, and loses nothing."""

import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ppo_comb_dist as comb
import ppo_interleaved_gru_beta as flagship
import ppo_kl_adaptive as adaptive
import ppo_lstm_atari as recurrent
import ppo_mlp_gaussian as base
import ppo_value_first as value_first

TESTS = Path(__file__).resolve().parent
START_LIMIT = 120  # seconds to start and reach what is waited for, on a machine that is busy
LIMIT = 20  # seconds to report a fault: it should take 5
SIGNAL_LIMIT = 10  # seconds to save and leave after a signal: it should take under 5
SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1, "num_workers": 2, "eval_episodes": 0}
BATCH = 64
DISCRETE = {"ppo_lstm_atari"}  # scripts that need discrete actions
CONTINUOUS = [base, flagship, value_first, adaptive, comb]

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds orphans in /proc")


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

    def assert_ends(self, code, *words, since=None, limit=LIMIT, traceback=False):
        """Exit code, words of the last line, a traceback or none (None: not looked at), in time, nothing left over."""
        assert self.process.wait(START_LIMIT) == code, self.stderr.read_text()
        if since is not None:
            assert time.time() - since < limit
        error = self.stderr.read_text()
        assert traceback is None or ("Traceback" in error) == traceback, error
        if words:
            last_line = error.splitlines()[-1]
            assert [word for word in words if word not in last_line] == [], error
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self):
        end = time.monotonic() + SIGNAL_LIMIT
        while self.pids():
            assert time.monotonic() < end, f"orphans: {self.pids()}"
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    """start(flags, env=..., script=..., VARIABLE=...) -> Process; what is left of it is killed after the test."""
    started = []

    def start(*flags, env="Healthy", script="ppo_mlp_gaussian", file=None, small=True, run_dir=True, **variables):
        sizes = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()] if small else []
        env_id = [f"--env-id=misbehaving:{env}-v0"] if env else []
        directory = tmp_path / f"run{len(started)}"
        run_dir = [f"--run-dir={directory}"] if run_dir else []
        flags = ["--no-cuda", *run_dir, *sizes, *env_id, *map(str, flags)]
        started.append(Process(file or TESTS.parent / f"{script}.py", directory, flags, variables))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def healthy(script):
    return "DiscreteAction" if script in DISCRETE else "Healthy"


def small_args(module, directory, **changes):
    env_id = f"misbehaving:{healthy(module.__name__)}-v0"
    sizes = SMALL | {"cuda": False, "total_timesteps": 3 * BATCH, "env_id": env_id}
    return module.Args(**sizes | {"run_dir": str(directory)} | changes)


def load(directory, name="checkpoint.pt"):
    return torch.load(directory / name, weights_only=True)


def assert_resumes(directory, module=base, iterations=2):
    """The checkpoint is finite and training goes on from it."""
    checkpoint = load(directory)
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    saved = checkpoint["args"] | {"env_id": f"misbehaving:{healthy(module.__name__)}-v0"}  # the fault is repaired
    torch.save(checkpoint | {"args": saved}, directory / "checkpoint.pt")
    total = checkpoint["global_step"] + iterations * BATCH
    result = module.train(module.Args(**saved | {"resume": str(directory), "total_timesteps": total}))
    assert (result["status"], result["global_step"]) == ("finished", total)
    assert result["iterations"] == checkpoint["iteration"] + iterations


def one_line(call, *args):
    """The message of the SystemExit that call raises, one line long, with no worker left behind."""
    with pytest.raises(SystemExit) as caught:
        call(*args)
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code, caught.value.code
    assert multiprocessing.active_children() == []
    return caught.value.code


def parse(monkeypatch, module, *flags):
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, flags)])
    return module.parse_args(module.Args)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished") / "run"
    base.train(small_args(base, directory))
    return directory


@pytest.fixture
def run_copy(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "copy")


def test_what_a_budget_leaves_out_is_printed(tmp_path, capsys):
    base.train(small_args(base, tmp_path / "run", total_timesteps=BATCH + 10))
    assert f"the last 10 of {BATCH + 10} steps are left out" in capsys.readouterr().out.splitlines()[0]


# Environments and the processes that step them

FAULTS = {
    "RaiseInStep": "environment 3 raised RuntimeError in step: the leg is broken",
    "RaiseInReset": " raised RuntimeError in reset: can't get up",
    "KilledInStep": "the process of environments 2 to 3 was killed by signal 9",
    "ExitInStep": "the process of environments 2 to 3 exited with code 3",
    "ObservationNotFinite": " observation that is not finite",
}


@pytest.mark.parametrize(
    "script, env",
    [
        *(("ppo_mlp_gaussian", env) for env in FAULTS),
        ("ppo_interleaved_gru_beta", "RaiseInStep"),
        ("ppo_lstm_atari", "DiscreteRaiseInStep"),
    ],
)
def test_fault_in_an_environment_is_reported_and_nothing_is_lost(start, script, env):
    run = start("--checkpoint-interval=0", "--total-timesteps=64000", env=env, script=script)
    run.process.wait(START_LIMIT)
    ended = time.time()
    raised = "Raise" in env
    run.assert_ends(1, FAULTS[env.removeprefix("Discrete")], f"--resume {run.directory}", traceback=raised)
    assert ended - min(at for _, at in run.events("fault")) < LIMIT
    if raised:  # the environment's own
        assert "misbehaving.py" in run.stderr.read_text()
    checkpoint = load(run.directory)
    assert checkpoint["global_step"] == run.steps()[-1] == checkpoint["iteration"] * BATCH >= 2 * BATCH
    assert_resumes(run.directory, importlib.import_module(script))


@pytest.mark.parametrize("module", [base, flagship])
@pytest.mark.parametrize("what", ["final observation", "reward"])
def test_value_that_is_not_finite_is_the_environments_fault(tmp_path, module, what):
    env_id = f"misbehaving:{what.title().replace(' ', '')}NotFinite-v0"
    message = one_line(module.train, small_args(module, tmp_path / "run", env_id=env_id, total_timesteps=640))
    assert f"environment 1 returned a {what} that is not finite" in message
    assert f"--resume {tmp_path / 'run'}" in message
    assert_resumes(tmp_path / "run", module)


def test_environment_whose_constructor_raises_is_reported(start):
    run = start(env="RaiseInConstructor", small=False)
    run.assert_ends(1, "misbehaving:RaiseInConstructor-v0", "RuntimeError", "no such robot", traceback=True)


def test_worker_killed_from_outside_is_noticed(start):
    run = start("--checkpoint-interval=0", "--total-timesteps=64000000")
    run.wait_until(lambda: len(run.steps()) >= 2)
    worker = next(pid for pid, _ in run.events("made") if pid != run.process.pid)
    killed = time.time()
    os.kill(worker, signal.SIGKILL)
    run.assert_ends(1, "was killed by signal 9", f"--resume {run.directory}", since=killed)
    assert load(run.directory)["global_step"] == run.steps()[-1]


@pytest.mark.parametrize("env", ["Healthy", "HangInStep"])
def test_killed_parent_leaves_no_process(start, env):
    run = start("--total-timesteps=64000000", env=env)
    run.wait_until(lambda: run.steps() if env == "Healthy" else run.events("fault"))
    assert len(run.pids()) >= 4  # the parent, the fork server, two workers
    run.process.kill()
    run.process.wait()
    run.assert_nothing_is_left()


# Signals


@pytest.mark.parametrize(
    "script, signum, whole_group",
    [
        ("ppo_mlp_gaussian", signal.SIGINT, False),
        ("ppo_mlp_gaussian", signal.SIGINT, True),
        ("ppo_mlp_gaussian", signal.SIGTERM, False),
        ("ppo_mlp_gaussian", signal.SIGTERM, True),
        ("ppo_interleaved_gru_beta", signal.SIGINT, True),
        ("ppo_value_first", signal.SIGINT, True),
        ("ppo_kl_adaptive", signal.SIGTERM, False),
        ("ppo_lstm_atari", signal.SIGINT, True),
    ],
)
def test_signal_saves_the_last_whole_iteration(start, script, signum, whole_group):
    run = start("--checkpoint-interval=0", "--total-timesteps=64000000", script=script, env=healthy(script))
    run.wait_until(lambda: len(run.steps()) >= 2)
    sent = time.time()
    (os.killpg if whole_group else os.kill)(run.process.pid, signum)
    words = [f"stopped by {signum.name}", f"--resume {run.directory}"]
    run.assert_ends(128 + signum, *words, since=sent, limit=SIGNAL_LIMIT)
    checkpoint = load(run.directory)
    assert checkpoint["global_step"] == run.steps()[-1] == checkpoint["iteration"] * BATCH
    assert_resumes(run.directory, importlib.import_module(script))


def test_signal_sent_twice_at_once_saves_too(start):
    """As timeout(1) does: once to the process and once to its group."""
    run = start("--checkpoint-interval=0", "--total-timesteps=64000000")
    run.wait_until(lambda: len(run.steps()) >= 2)
    os.kill(run.process.pid, signal.SIGTERM)
    time.sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGTERM)
    run.assert_ends(143, "stopped by SIGTERM", f"--resume {run.directory}")
    assert load(run.directory)["global_step"] == run.steps()[-1]


@pytest.mark.parametrize("script", ["ppo_mlp_gaussian", "ppo_interleaved_gru_beta"])
def test_signal_while_a_step_hangs_saves_the_last_whole_iteration(start, script):
    run = start("--checkpoint-interval=0", "--total-timesteps=64000", env="HangInStep", script=script)
    run.wait_until(lambda: run.events("fault"))
    sent = time.time()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_ends(130, "stopped by SIGINT", f"--resume {run.directory}", since=sent, limit=SIGNAL_LIMIT)
    assert load(run.directory)["global_step"] == run.steps()[-1] == 2 * BATCH


def test_second_interrupt_leaves_at_once(start):
    run = start("--checkpoint-interval=0", "--total-timesteps=64000", env="HangInStep")
    run.wait_until(lambda: run.events("fault"))
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(1)  # the first one gives the worker that hangs two seconds to end
    sent = time.time()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_ends(130, since=sent, limit=SIGNAL_LIMIT)
    assert "stopped by" not in run.stderr.read_text() and not (run.directory / "checkpoint.pt").exists()


def test_signal_in_a_slow_step_ends_the_run(start):
    run = start(env="SlowStep")
    run.wait_until(lambda: len(run.events("made")) == 5)
    time.sleep(1)
    sent = time.time()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_ends(130, "no iteration was finished", since=sent, limit=SIGNAL_LIMIT)
    assert not (run.directory / "checkpoint.pt").exists()


def test_interrupt_while_the_fork_server_imports_is_one_line(start):
    run = start()
    run.wait_until(lambda: run.events("made"))
    time.sleep(0.5)
    sent = time.time()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_ends(130, "no iteration was finished", since=sent, limit=SIGNAL_LIMIT)


def test_signal_while_environments_are_made_ends_the_run(start):
    run = start("--num-envs=8", "--num-workers=8", env="HangInConstructor")
    run.wait_until(lambda: len(run.events("made")) == 9)
    sent = time.time()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_ends(130, "no iteration was finished", since=sent, limit=SIGNAL_LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_mlp_gaussian", "ppo_interleaved_gru_beta"])
@pytest.mark.parametrize("seconds", [2, 4, 6])
def test_signal_while_the_update_is_compiled_ends_the_run(start, tmp_path, script, seconds):
    run = start("--compile", script=script, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    run.wait_until(lambda: len(run.events("made")) == 5)
    time.sleep(seconds)
    assert run.steps() == []
    sent = time.time()
    os.killpg(run.process.pid, signal.SIGINT)
    run.assert_ends(130, "stopped by SIGINT", "no iteration was finished", since=sent, limit=SIGNAL_LIMIT)


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
    script.train(script.parse_args(script.Args))
"""


@pytest.mark.parametrize("where", ["torch.save = killing_save", "os.replace = killing_replace"])
def test_kill_while_a_checkpoint_is_written_leaves_the_one_before(start, tmp_path, where):
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER.replace("WHERE", where))
    run = start("--checkpoint-interval=1", "--total-timesteps=640", file=killer)
    run.assert_ends(-signal.SIGKILL)
    assert load(run.directory)["iteration"] == 2
    assert_resumes(run.directory)


def test_damaged_checkpoint_is_one_line(start, run_copy):
    checkpoint = run_copy / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    start(f"--resume={run_copy}", env=None, small=False).assert_ends(1, str(run_copy), "damaged")


@pytest.mark.parametrize("content", ["text", "empty", "pickle", "list", "other dict"])
def test_foreign_file_as_checkpoint_is_one_line(monkeypatch, tmp_path, content):
    file = tmp_path / "checkpoint.pt"
    file.write_text("" if content == "empty" else "hello\n")
    if content == "pickle":
        torch.save({"script": base.__name__, "args": Path("/"), "model": {}}, file)
    if content == "list":
        torch.save([1, 2], file)
    if content == "other dict":
        torch.save({"script": base.__name__, "args": {}}, file)
    assert f"{file} is damaged or no checkpoint" in one_line(parse, monkeypatch, base, "--resume", tmp_path)


def test_checkpoint_of_another_script_is_named(monkeypatch, finished_run):
    message = one_line(parse, monkeypatch, flagship, "--resume", finished_run)
    assert "ppo_mlp_gaussian.py" in message and "ppo_interleaved_gru_beta.py" in message


def test_checkpoint_of_another_version_names_the_flags(monkeypatch, run_copy):
    checkpoint = load(run_copy)
    checkpoint["args"]["old_flag"] = checkpoint["args"].pop("gamma")
    torch.save(checkpoint, run_copy / "checkpoint.pt")
    message = one_line(parse, monkeypatch, base, "--resume", run_copy)
    assert "gamma" in message and "old_flag" in message


def test_checkpoint_of_other_shapes_is_one_line(run_copy):
    checkpoint = load(run_copy)
    checkpoint["args"]["env_id"] = "Pendulum-v1"
    torch.save(checkpoint, run_copy / "checkpoint.pt")
    args = base.Args(**checkpoint["args"] | {"resume": str(run_copy), "run_dir": None})
    assert "shapes [[3, 0], [2, 0]], not [[3, 0], [1, 0]]" in one_line(base.train, args)


@pytest.mark.parametrize("what", ["nowhere", "empty directory"])
def test_resume_of_nothing_is_one_line(monkeypatch, tmp_path, what):
    path = tmp_path if what == "empty directory" else tmp_path / "nowhere"
    assert str(path) in one_line(parse, monkeypatch, base, "--resume", path)


@pytest.mark.parametrize(
    "flags",
    [["--gamma", "0.9"], ["--env-id", "Pendulum-v1"], ["--seed", "2"], ["--num-envs", "8"], ["--no-norm-obs"]],
    ids=" ".join,
)
def test_resume_with_a_changed_flag_names_it(monkeypatch, finished_run, flags):
    before = {file: file.read_bytes() for file in finished_run.iterdir()}
    message = one_line(base.train, parse(monkeypatch, base, "--resume", finished_run, *flags))
    assert flags[0].replace("--no-", "--") in message and "can't change" in message
    assert {file: file.read_bytes() for file in finished_run.iterdir()} == before


def test_resume_with_flags_that_may_change(monkeypatch, run_copy):
    flags = ["--total-timesteps", 4 * BATCH, "--num-workers", 1, "--checkpoint-interval", 1, "--eval-episodes", 1]
    result = base.train(parse(monkeypatch, base, "--resume", run_copy, *flags))
    assert result["global_step"] == 4 * BATCH and len(result["eval_returns"]) == 1


def test_resume_with_a_budget_that_is_used_up_or_elsewhere_is_one_line(monkeypatch, finished_run, tmp_path):
    args = parse(monkeypatch, base, "--resume", finished_run, "--total-timesteps", BATCH)
    assert f"--total-timesteps {BATCH}" in one_line(base.train, args)
    args = parse(monkeypatch, base, "--resume", finished_run, "--run-dir", tmp_path / "elsewhere")
    assert f"--run-dir {tmp_path / 'elsewhere'}" in one_line(base.train, args)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("module", [base, flagship, recurrent])
def test_policy_can_not_be_trained_on(module, tmp_path):
    module.train(small_args(module, tmp_path / "run"))
    policy = tmp_path / "run" / "policy.pt"
    saved = load(tmp_path / "run", "policy.pt")["args"]
    args = module.Args(**saved | {"resume": str(policy), "run_dir": None, "total_timesteps": 5 * BATCH})
    message = one_line(module.train, args)
    assert str(policy) in message and "--total-timesteps 0" in message and "checkpoint.pt" in message


def test_run_directory_that_holds_a_run_is_not_touched(finished_run):
    before = {file: file.read_bytes() for file in finished_run.iterdir()}
    message = one_line(base.train, small_args(base, finished_run))
    assert f"--run-dir {finished_run} holds a run" in message and f"--resume {finished_run}" in message
    assert {file: file.read_bytes() for file in finished_run.iterdir()} == before


def test_run_directory_that_can_not_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert f"--run-dir {tmp_path / 'file' / 'run'}" in one_line(base.train, small_args(base, tmp_path / "file" / "run"))


# Divergence


@pytest.mark.parametrize(
    "module, change",
    [
        *((module, {"env_id": "misbehaving:EnormousRewards-v0"}) for module in (base, flagship, comb, value_first)),
        *((module, {"learning_rate": 1e30}) for module in (base, flagship, comb, value_first, recurrent)),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_divergence_keeps_the_last_good_checkpoint(module, change, tmp_path):
    directory = tmp_path / "run"
    args = small_args(module, directory, norm_reward=False, num_minibatches=1, total_timesteps=640, **change)
    message = one_line(module.train, args)
    assert "diverged at step" in message and "--learning-rate" in message and str(directory) in message
    result, checkpoint = json.loads((directory / "result.json").read_text()), load(directory)
    assert result["status"] == "diverged"
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert checkpoint["iteration"] == result["iterations"] >= 1
    if "env_id" in change:
        assert checkpoint["iteration"] == 2
        assert_resumes(directory, module)


def test_divergence_in_the_first_iteration_names_no_checkpoint(start):
    run = start("--no-norm-reward", env="EnormousRewardsAtOnce")
    run.assert_ends(1, "diverged at step 64", "--learning-rate")
    assert json.loads((run.directory / "result.json").read_text())["status"] == "diverged"
    assert not (run.directory / "checkpoint.pt").exists() and "checkpoint.pt" not in run.stderr.read_text()
    args = small_args(base, run.directory, learning_rate=1e-4)  # it may be tried again in the same directory
    assert base.train(args)["status"] == "finished"


def test_rewards_near_the_largest_float_do_not_poison_the_checkpoint(tmp_path):
    directory = tmp_path / "run"
    args = small_args(base, directory, total_timesteps=640, env_id="misbehaving:LargestRewards-v0")
    with suppress(SystemExit):
        base.train(args)
    assert all(tensor.isfinite().all() for tensor in load(directory)["return_norm"].values())


# Spaces, ids, sizes, flags, and what is not installed


@pytest.mark.parametrize(
    "module, env, words",
    [
        (base, "DictObservation", ["observation", "Dict"]),
        (base, "DiscreteAction", ["action", "Discrete(3)"]),
        (flagship, "DictObservation", ["observation", "Dict"]),
        (adaptive, "DictObservation", ["observation", "Dict"]),
        (flagship, "InfiniteBounds", ["action", "finite", "inf"]),
        (flagship, "EqualBounds", ["action", "low < high"]),
        (comb, "DiscreteAction", ["action", "Discrete(3)"]),
        (comb, "InfiniteBounds", ["finite action bounds", "inf"]),
        (comb, "EqualBounds", ["action bounds", "low < high"]),
        (value_first, "DictObservation", ["observation", "Dict"]),
        (value_first, "BinaryActions", ["action", "MultiBinary(2)", "Discrete"]),
        *((module, "WholeNumberActions", ["action", "int64", "floats"]) for module in CONTINUOUS),
    ],
)
def test_spaces_that_the_script_can_not_drive_are_named(tmp_path, module, env, words):
    message = one_line(module.train, small_args(module, tmp_path / "run", env_id=f"misbehaving:{env}-v0"))
    assert [word for word in [f"misbehaving:{env}-v0", *words] if word not in message] == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", [base, flagship, value_first, adaptive, recurrent, comb])
def test_whole_numbers_as_observations_train_without_normalisation_too(module, tmp_path):
    env_id = f"misbehaving:{'Discrete' if module is recurrent else ''}ByteObservation-v0"
    for norm_obs in (False, True):
        changes = {"norm_obs": norm_obs, "eval_episodes": 2, "num_workers": 1}
        changes |= {"preset": "paper"} if module is adaptive else {}  # the post's time feature makes floats of them
        args = small_args(module, tmp_path / str(norm_obs), env_id=env_id, **changes)
        assert module.train(args)["status"] == "finished"


def test_infinite_action_bounds_are_fine_for_a_gaussian_unless_it_needs_them(tmp_path):
    args = small_args(base, tmp_path / "run", env_id="misbehaving:InfiniteBounds-v0")
    assert base.train(args)["status"] == "finished"
    for change in ({"scale_actions": True}, {"fixed_std": 0.05}):
        message = one_line(base.train, replace(args, run_dir=str(tmp_path / "other"), **change))
        assert "finite action bounds" in message and "--scale-actions and --fixed-std" in message


@pytest.mark.parametrize("script", ["ppo_mlp_gaussian", "ppo_interleaved_gru_beta"])
def test_unknown_id_is_one_line(start, script):
    run = start("--env-id=HalfCheeta-v5", env=None, small=False, script=script)
    run.assert_ends(1, "--env-id HalfCheeta-v5", "HalfCheetah")
    assert not run.directory.exists()


@pytest.mark.parametrize("env_id", ["no_such_module:X-v0", "misbehaving:NoSuch-v0", "Pendulum-v99", "a:b:c", "?", ""])
def test_every_kind_of_unknown_id_is_one_line(tmp_path, env_id):
    assert f"--env-id {env_id}" in one_line(base.train, small_args(base, tmp_path / "run", env_id=env_id))


def test_missing_humanoid_bench_is_one_line(start, tmp_path):
    package = tmp_path / "stub" / "humanoid_bench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no module of that name here')\n")
    run = start("--env-id=h1hand-walk-v0", env=None, small=False, PYTHONPATH=[str(package.parent)])
    run.assert_ends(1, "--env-id h1hand-walk-v0", "HumanoidBench", "install")


@pytest.mark.parametrize(
    "module, changes, words",
    [
        (base, {"num_envs": 0}, ["--num-envs 0"]),
        (base, {"num_steps": -16}, ["--num-steps -16"]),
        (base, {"num_minibatches": 0}, ["--num-minibatches 0"]),
        (base, {"update_epochs": 0}, ["--update-epochs 0"]),
        (base, {"num_workers": -1}, ["--num-workers -1"]),
        (base, {"checkpoint_interval": -1}, ["--checkpoint-interval -1"]),
        (base, {"eval_episodes": -1}, ["--eval-episodes -1"]),
        (base, {"seed": -1}, ["--seed -1"]),
        (base, {"fixed_std": 0.0}, ["--fixed-std 0.0"]),
        (base, {"num_minibatches": 3}, ["--num-minibatches 3", "64", "equal parts"]),
        (base, {"num_minibatches": 64}, ["--num-minibatches 64", "2 or more"]),
        (base, {"num_minibatches": 128}, ["--num-minibatches 128"]),
        (base, {"total_timesteps": 63}, ["--total-timesteps 63", "64"]),
        (base, {"total_timesteps": -1}, ["--total-timesteps -1"]),
        (base, {"total_timesteps": 0}, ["--total-timesteps 0", "--resume"]),
        (base, {"eval_interval": 1}, ["--eval-interval", "--eval-episodes"]),
        (base, {"capture_video": True}, ["--capture-video", "--eval-episodes"]),
        (base, {"seed": 2**64}, [f"--seed {2**64}"]),
        (base, {"gamma": 1.5}, ["--gamma 1.5", "from 0 to 1"]),
        (base, {"gae_lambda": float("nan")}, ["--gae-lambda nan", "from 0 to 1"]),
        (base, {"learning_rate": -1.0}, ["--learning-rate -1.0", "at least 0"]),
        (base, {"critic_learning_rate": -1.0}, ["--critic-learning-rate -1.0"]),
        (adaptive, {"value_learning_rate": -1.0}, ["--value-learning-rate -1.0"]),
        (base, {"clip_coef": -0.1}, ["--clip-coef -0.1"]),
        (base, {"max_grad_norm": -0.5}, ["--max-grad-norm -0.5"]),
        (flagship, {"num_envs": 0}, ["--num-envs 0"]),
        (base, {"num_steps": 0}, ["--num-steps 0"]),
        (adaptive, {"num_steps": -1}, ["--num-steps -1"]),
        (adaptive, {"num_minibatches": 3}, ["--num-minibatches 3", "64", "equal parts"]),
        (flagship, {"window": 0}, ["--window 0"]),
        (flagship, {"hidden_size": 0}, ["--hidden-size 0"]),
        (flagship, {"stall_steps": -1}, ["--stall-steps -1"]),
        (flagship, {"init_std": 0.6}, ["--init-std 0.6"]),
        (flagship, {"init_std": 0.0}, ["--init-std 0.0"]),
        (flagship, {"beta_head": "beta"}, ["--beta-head beta", "mode, alpha"]),
        (flagship, {"preset": "Paper"}, ["--preset Paper", "default, paper"]),
        (comb, {"num_envs": 0}, ["--num-envs 0"]),
        (comb, {"num_teeth": 1}, ["--num-teeth 1"]),
        (comb, {"density": "quadratic"}, ["--density quadratic", "linear", "as-coded"]),
        (value_first, {"num_envs": 0}, ["--num-envs 0"]),
        (value_first, {"order": "policy-first"}, ["--order policy-first", "joint, phases, value-first"]),
        (value_first, {"critic": "vector"}, ["--critic vector", "scalar, support"]),
        (value_first, {"support_atoms": 1}, ["--support-atoms 1"]),
        (value_first, {"support_min": 110.0}, ["--support-min 110.0", "--support-max 110.0"]),
    ],
    ids=str,
)
def test_impossible_sizes_are_named(tmp_path, module, changes, words):
    message = one_line(module.train, small_args(module, tmp_path / "run", **changes))
    assert [word for word in words if word not in message] == []
    assert not (tmp_path / "run").exists()


def test_budget_that_whole_iterations_do_not_use_up_is_printed(tmp_path, capsys):
    result = base.train(small_args(base, tmp_path / "run", total_timesteps=2 * BATCH + 10))
    assert result["global_step"] == 2 * BATCH
    assert "last 10 of 138 steps" in capsys.readouterr().out


def test_runs_of_one_name_have_a_directory_each(start, tmp_path):
    """Begun side by side, in the same second or not."""
    started = [start(f"--learning-rate={rate}", "--total-timesteps=64", run_dir=False) for rate in (1e-3, 1e-4, 1e-5)]
    for run in started:
        run.assert_ends(0)
    directories = list((tmp_path / "runs").iterdir())
    assert {json.loads((x / "args.json").read_text())["learning_rate"] for x in directories} == {1e-3, 1e-4, 1e-5}
    assert len(directories) == 3
    assert all(re.fullmatch(r"misbehaving-Healthy-v0__ppo_mlp_gaussian__1__\d+", x.name) for x in directories)


def test_second_run_of_one_name_waits_for_a_second_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = iter([1000, 1000, 1001])
    monkeypatch.setattr(base.time, "time", lambda: next(now, 2000))
    monkeypatch.setattr(base.time, "sleep", lambda seconds: None)
    for _ in range(2):
        run = base.Run(base.Args(**SMALL | {"total_timesteps": BATCH}))
        run._open_directory()
        os.close(run.lock)
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["HalfCheetah-v5__ppo_mlp_gaussian__1__1000", "HalfCheetah-v5__ppo_mlp_gaussian__1__1001"]


@pytest.mark.parametrize("begin", ["fresh", "resumed"])
def test_directory_in_which_another_process_works_is_left_alone(start, tmp_path, run_copy, begin):
    flags = {"fresh": [f"--run-dir={tmp_path / 'shared'}"], "resumed": [f"--resume={run_copy}"]}[begin]
    more = ["--total-timesteps=64000000", "--checkpoint-interval=0"]
    first = start(*flags, *more, run_dir=False)
    first.wait_until(lambda: first.steps())
    second = start(*flags, *more, run_dir=False)
    directory = {"fresh": tmp_path / "shared", "resumed": run_copy}[begin]
    second.assert_ends(1, str(directory), "another process works at this run")
    sent = time.time()
    os.kill(first.process.pid, signal.SIGINT)
    first.assert_ends(130, f"--resume {directory}", since=sent, limit=SIGNAL_LIMIT)
    assert load(directory)["global_step"] == first.steps()[-1]
    assert len(list(directory.glob("events.out.*"))) == (1 if begin == "fresh" else 2)


@pytest.mark.parametrize("flags", [["--no-such-flag", "1"], ["--num-envs", "four"], ["--resume"]], ids=" ".join)
@pytest.mark.parametrize("module", [base, flagship])
def test_unknown_flag_or_value_exits_with_2(monkeypatch, capsys, module, flags):
    with pytest.raises(SystemExit) as caught:
        parse(monkeypatch, module, *flags)
    assert caught.value.code == 2
    assert flags[-1] in capsys.readouterr().err


def test_video_without_rendering_is_one_line(start):
    flags = ["--env-id=InvertedPendulum-v5", "--capture-video", "--eval-episodes=1"]
    run = start(*flags, env=None, MUJOCO_GL="disabled")
    # Gymnasium's viewer, half made, complains as it is thrown away.
    run.assert_ends(1, "--capture-video", "MUJOCO_GL=egl", "libosmesa6", traceback=None)
    assert not run.directory.exists()


@pytest.mark.filterwarnings("ignore:.*render_mode")
@pytest.mark.parametrize("module", [base, flagship, value_first, adaptive, recurrent, comb])
def test_video_of_an_environment_that_draws_nothing_is_one_line(module):
    message = one_line(module.check_video, f"misbehaving:{healthy(module.__name__)}-v0")
    assert message.startswith("--capture-video: ")


def test_compiling_without_a_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    message = one_line(base.train, small_args(base, tmp_path / "run", compile=True))
    assert "--compile" in message and "/nonexistent" in message and "CXX" in message


def test_tracking_without_wandb_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in one_line(base.train, small_args(base, tmp_path / "run", track=True))
