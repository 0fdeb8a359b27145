"""benchmark.sh: the real script swept, interrupted, broken, started again; plot_runs.py: numbers known by hand."""

import fcntl
import importlib
import json
import math
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import plot_runs
from results import h1_table

ROOT = Path(__file__).resolve().parent.parent
SUITES = re.search(r"^suites=\"(.*)\"", (ROOT / "benchmark.sh").read_text(), re.MULTILINE)[1].split()
FLAGS = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 0".split()
LIMIT = 120  # seconds, on a machine that is busy


def environment(**more):
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    return os.environ | {"PYTHON": sys.executable, "PYTHONPATH": path} | more


def start(runs, what, *arguments, **more):
    """benchmark.sh in a session of its own, from another folder than its own."""
    return subprocess.Popen(
        [str(ROOT / "benchmark.sh"), what, "--runs", str(runs), *arguments], cwd=runs.parent, env=environment(**more),
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def sweep(runs, env_id, seeds, *flags, options=(), **more):
    chosen = ["--env-ids", f"misbehaving:{env_id}-v0", "--seeds", str(seeds), "--workers", "2", *options]
    return start(runs, str(ROOT / "ppo_mlp_gaussian.py"), *chosen, "--", *FLAGS, *flags, **more)


def program(file, text):
    """A stand-in for a program, first on the PATH that is returned."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return f"{file.parent}{os.pathsep}{os.environ['PATH']}"


def quick_python(folder, text=":"):
    """A stand-in for Python whose runs, SCRIPT --env-id ID --seed N --run-dir $7, do as `text` says and finish."""
    finished = 'mkdir -p "$7" && echo \'{"status": "finished"}\' > "$7/result.json"'
    program(folder / "python", f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n{text}\n{finished}')
    return str(folder / "python")


def finish(process):
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def wait_until(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def steps(directory):
    return json.loads((directory / "result.json").read_text())["global_step"]


def test_a_stopped_sweep_goes_on(tmp_path):
    runs, flags = tmp_path / "runs", ("--total-timesteps", "1920")
    process = sweep(runs, "Healthy", 2, *flags)
    wait_until(lambda: sum("step 64/" in log.read_text() for log in runs.glob("*.log")) == 2)
    os.killpg(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "the same command goes on" in output and "failed:" not in output
    directories = sorted(path for path in runs.iterdir() if path.is_dir())
    name = r"misbehaving-Healthy-v0__ppo_mlp_gaussian__[0-9a-f]{8}__"
    assert [bool(re.fullmatch(name + seed, run.name)) for run, seed in zip(directories, "12")] == [True, True]
    stopped = [run for run in directories if not (run / "result.json").exists()]  # on a busy machine one may be through
    assert stopped

    code, output = finish(sweep(runs, "Healthy", 2, *flags, options=["--dry-run"]))
    assert [run for run in directories if f"--resume {run}  # stopped" in output] == stopped
    code, output = finish(sweep(runs, "Healthy", 2, *flags))
    assert code == 0 and [steps(run) for run in directories] == [1920, 1920]
    for run in stopped:  # from where they stopped
        log = Path(f"{run}.log").read_text()
        assert "stopped by SIG" in log and log.count("step 64/1920") == 1


def test_a_terminated_sweep_stops_its_runs(tmp_path):
    runs = tmp_path / "runs"
    text = "trap 'echo stopped; exit 143' TERM; echo begun; for i in $(seq 600); do sleep 0.1; done"
    process = sweep(runs, "Healthy", 2, PYTHON=quick_python(tmp_path / "bin", text))
    wait_until(lambda: sum("begun" in log.read_text() for log in runs.glob("*.log")) == 2)
    process.terminate()  # benchmark.sh alone, not its group
    code, output = finish(process)
    assert code == 143 and "the same command goes on" in output
    assert ["stopped" in log.read_text() for log in runs.glob("*.log")] == [True, True]


def test_a_run_whose_end_the_shell_missed_is_counted():
    """After a signal at a bad moment `wait` may not know a child that has ended: waiting on would spin for ever."""
    text = (ROOT / "benchmark.sh").read_text()
    await_one = text[text.index("running=() slot_of") : text.index("\nstop() {")]
    program = f"""{await_one}
        directories=(run); state() {{ echo finished; }}; report() {{ echo "$@"; }}
        free=() finished=0 running=([999999]=0) slot_of=([999999]=1)
        await_one; echo "${{#running[@]}} running, $finished finished, slot ${{free[*]}} free" """
    output = subprocess.check_output(["bash", "-euo", "pipefail", "-c", program], text=True, timeout=LIMIT)
    assert output.split("\n")[:3] == ["finished run", "", "0 running, 1 finished, slot 1 free"]


def test_a_terminal_shows_how_far_each_run_is(tmp_path):
    python = quick_python(tmp_path / "bin", 'echo "step 64/640  0:00:0$5 left"; sleep $5')
    terminal, end = pty.openpty()
    script, chosen = str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids X-v0 --seeds 3 --workers 3".split()
    command = [str(ROOT / "benchmark.sh"), script, *chosen, "--runs", str(tmp_path)]
    process = subprocess.Popen(command, env=environment(PYTHON=python), stdout=end, stderr=end)
    os.close(end)
    shown = b""
    with suppress(OSError):  # the end
        while part := os.read(terminal, 4096):
            shown += part
    shown = shown.decode().replace("\r", "")
    assert process.wait(LIMIT) == 0
    first = shown[shown.index("finished /") :]  # what is drawn when the first run has ended
    drawn = first[: first.index("\033[")].splitlines()
    assert drawn[1] == "3 runs: 1 finished, 2 running, 0 failed" and len(drawn) == 4
    for line, seed in zip(sorted(drawn[2:]), "23"):  # in the order of their process numbers, which may wrap
        assert re.fullmatch(rf"  step 64/640  0:00:0{seed} left  X-v0__ppo_mlp_gaussian__\w{{8}}__{seed}", line)
    assert shown.count("\033[4A") == 1  # back over the counts and three runs


def test_failed_runs_are_named_and_tried_again_finished_ones_skipped(tmp_path):
    runs, budget = tmp_path / "runs", ("--total-timesteps", "128")
    text = 'echo ran; [ "$2" = --resume ] && { echo "$3/checkpoint.pt: broken"; exit 1; }'
    python = quick_python(tmp_path / "bin", text)
    code, output = finish(sweep(runs, "Healthy", 2, *budget, options=["--dry-run"]))
    commands = [line.split("  # ") for line in output.splitlines()]
    assert code == 0 and [state for _, state in commands] == ["new", "new"] and not runs.exists()
    first, second = (Path(shlex.split(command)[shlex.split(command).index("--run-dir") + 1]) for command, _ in commands)
    second.mkdir(parents=True)
    (second / "checkpoint.pt").write_bytes(b"torn")

    code, output = finish(sweep(runs, "Healthy", 2, *budget, PYTHON=python))
    assert code == 1 and (first / "result.json").exists() and not (second / "result.json").exists()
    command, *reason = output[output.index("\nfailed: ") :].strip().splitlines()
    assert str(second) in command and len(reason) == 1 and "checkpoint.pt" in reason[0]

    (second / "checkpoint.pt").unlink()
    (second / "result.json").write_text('{"status": ')  # torn: neither finished nor diverged
    before = (first / "result.json").stat().st_mtime_ns
    code, output = finish(sweep(runs, "Healthy", 2, *budget, PYTHON=python))
    assert code == 0 and (first / "result.json").stat().st_mtime_ns == before
    assert "2 runs: 2 finished" in output

    # Nothing is left: nothing is started. The order of the flags makes no other run, another flag does.
    logs = [Path(f"{run}.log").read_text() for run in (first, second)]
    code, output = finish(sweep(runs, "Healthy", 2, *budget, PYTHON=python))
    assert code == 0 and [Path(f"{run}.log").read_text() for run in (first, second)] == logs
    reordered = ["--env-ids", "misbehaving:Healthy-v0", "misbehaving:Healthy-v0", "--dry-run", "--", *budget, *FLAGS]
    code, output = finish(start(runs, str(ROOT / "ppo_mlp_gaussian.py"), *reordered))
    assert output.count("# finished") == 1 == output.count("\n")  # an environment named twice is one
    code, output = finish(sweep(runs, "Healthy", 1, *budget, "--gamma", "0.9", options=["--dry-run"]))
    assert "# new" in output


def test_a_flag_that_is_written_in_another_way_is_no_other_run(tmp_path):
    def names(*flags):
        code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, *flags, options=["--dry-run"]))
        assert code == 0
        return shlex.split(output)[shlex.split(output).index("--run-dir") + 1]

    name = names("--exp-name", "a_b c=d", "--no-norm-reward", "--gamma", "0.9")
    assert names("--gamma=0.9", "--exp_name=a_b c=d", "--no_norm_reward") == name
    assert names("--exp-name", "a-b c=d", "--no-norm-reward", "--gamma", "0.9") != name


BOX = ["╭─ Unrecognized options ─╮", "│ --gamam │", *["│ help │"] * 20, "╰──╯"]


@pytest.mark.parametrize(
    "log, shown",
    [
        (["step 64", "no such file", ""], ["no such file"]),
        (["step 64", *BOX], BOX[:12]),
        ([*BOX, "step 64", *BOX[:2], BOX[-1]], [*BOX[:2], BOX[-1]]),
        ([*BOX, "no such file"], ["no such file"]),
    ],
)
def test_of_a_failed_run_the_lines_that_matter_are_shown(log, shown, tmp_path):
    (tmp_path / "log").write_text("\n".join([*log, ""]))
    python = quick_python(tmp_path, f"cat {tmp_path}/log; exit 2")
    code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, PYTHON=python))
    assert code == 1 and [line.strip() for line in output.split("\nfailed: ")[1].splitlines()[1:]] == shown


def test_of_a_wrong_flag_the_complaint_is_shown(tmp_path):
    code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, "--gamam", "0.9"))
    assert code == 1 and "Unrecognized options: --gamam" in output.split("\nfailed: ")[1]


def test_a_run_that_another_process_works_at_is_not_started(tmp_path):
    python = quick_python(tmp_path)
    finish(sweep(tmp_path / "runs", "Healthy", 1, PYTHON=python))
    (log,) = (tmp_path / "runs").glob("*.log")
    (log.with_suffix("") / "result.json").unlink()
    path = program(tmp_path / "bin" / "flock", f"exec {shutil.which('flock')} -n $3")  # without the ten seconds' wait
    with open(log, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, PYTHON=python, PATH=path))
    assert code == 1 and "another process works at this run" in output
    path = program(tmp_path / "bin" / "flock", "exit 71")  # no locks available
    code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, PYTHON=python, PATH=path))
    assert code == 0 and "1 finished" in output


def test_without_the_programs_that_macos_lacks_it_runs(tmp_path):
    (tmp_path / "bin").mkdir()
    for file in {file.name: file for folder in os.get_exec_path()[::-1] for file in Path(folder).glob("*")}.values():
        if file.name not in ("flock", "taskset", "sha1sum" if shutil.which("shasum") else ""):
            (tmp_path / "bin" / file.name).symlink_to(file)
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.sched_getaffinity")
    places = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path), "PYTHON": quick_python(tmp_path)}
    code, output = finish(sweep(tmp_path / "runs", "Healthy", 2, "--gamma=0.9", **places))
    assert code == 0 and "2 runs: 2 finished" in output, output
    names = {run.name for run in (tmp_path / "runs").glob("*__1")}
    code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, "--gamma", "0.9", options=["--dry-run"]))
    assert {Path(shlex.split(output)[7]).name} == names  # the same hash


@pytest.mark.parametrize(
    "visible, listed, given",
    [
        ("4,GPU-7f", "exit 1", ["4", "GPU-7f", "4", "GPU-7f"]),
        ("", "echo 'GPU 0: H100'", ["", "", "", ""]),
        (None, "echo 'GPU 0: H100 (UUID: GPU-1)'; echo 'GPU 1: H100 (UUID: GPU-2)'", ["0", "1", "0", "1"]),
        (None, "echo 'NVIDIA-SMI has failed'; exit 9", ["none"] * 4),
    ],
)
def test_runs_are_spread_over_the_gpus(visible, listed, given, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = program(tmp_path / "bin" / "nvidia-smi", listed)
    python = quick_python(tmp_path, 'echo "on ${CUDA_VISIBLE_DEVICES-none}"')
    more = {"PATH": path, "PYTHON": python} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    runs = tmp_path / "runs"
    code, _ = finish(sweep(runs, "Healthy", 4, options=["--workers", "4"], **more))
    logs = [log.read_text().splitlines() for log in sorted(runs.glob("*.log"))]
    assert code == 0 and [log[-1] for log in logs] == [f"on {gpu}" for gpu in given]
    assert all("--env-id misbehaving:Healthy-v0" in log[0] for log in logs)  # the command that was started


@pytest.mark.skipif(not shutil.which("taskset"), reason="runs are bound by taskset")
@pytest.mark.parametrize("seeds", [1, 2])
def test_the_cores_are_shared_out_among_the_runs(seeds, tmp_path):
    python = quick_python(tmp_path, "env -u OMP_NUM_THREADS nproc")
    code, _ = finish(sweep(tmp_path / "runs", "Healthy", seeds, PYTHON=python))
    counts = [int(log.read_text().split()[-1]) for log in (tmp_path / "runs").glob("*.log")]
    assert code == 0 and sum(counts) == max(seeds, len(os.sched_getaffinity(0)))


def test_a_diverged_run_counts_and_is_not_tried_again(tmp_path):
    runs = tmp_path / "runs"
    python = quick_python(tmp_path, 'mkdir -p "$7"; echo \'{"status": "diverged"}\' > "$7/result.json"; exit 1')
    code, output = finish(sweep(runs, "Healthy", 1, PYTHON=python))
    assert code == 0 and "1 diverged" in output
    (log,) = runs.glob("*.log")
    before = log.read_text()
    code, output = finish(sweep(runs, "Healthy", 1, PYTHON=python))
    assert code == 0 and log.read_text() == before
    assert output == "all 1 runs have ended: 0 finished, 1 diverged\n"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["nonsense"], "no suite 'nonsense'"),
        (["nonsense.py", "--env-ids", "X"], "no script nonsense.py in /"),
        ([str(ROOT / "ppo_mlp_gaussian.py")], "--env-ids names no environment"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--seeds", "0"], "whole number"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--seeds", "1", "2", "3"], "takes one number, a count"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--gamma", "1"], "flags of the script come after --"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--", "--seed", "3"], "--seed can't come after --"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--", "--run_dir=d"], "--run_dir can't come after --"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--", "--gamma=1", "--gamma", "1"], "--gamma is given"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--", "--no-cuda", "--num_envs=1", "--cuda"], "twice"),
        ([str(ROOT / "ppo_mlp_gaussian.py"), "--env-ids", "X", "--", "--num_envs=1", "--num-envs", "1"], "twice"),
        (["base", "--seeds", "1"], "a suite has its own"),
        (["base", "--seeds=1"], "a suite has its own"),
        (["base", "--env-ids"], "--env-ids names no environment"),
        (["base", "--runs", "/dev/null/runs"], "--runs /dev/null/runs can't be made"),
        (["base", "--runs", ""], "--runs needs a value"),
        (["base", "--runs", "--dry-run"], "--runs needs a value"),
        (["base", "--launcher", "pbs"], "local or slurm"),
        (["base", "--time", "10"], "--launcher slurm"),
        (["base", "--workers"], "needs a value"),
    ],
)
def test_a_wrong_argument_ends_in_one_line(tmp_path, arguments, complaint):
    code, output = finish(
        subprocess.Popen(
            [str(ROOT / "benchmark.sh"), *arguments], cwd=tmp_path, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
    )  # fmt: skip
    assert code == 2 and complaint in output and output.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_slurm_gets_one_array_and_a_task_stops_and_queues_itself_again(tmp_path):
    """With stand-ins for Slurm's commands that write down how they were called, and for Python."""
    runs = tmp_path / "runs"
    program(tmp_path / "bin" / "scontrol", f'printf "%s\\n" "$@" > {tmp_path}/scontrol')
    path = program(tmp_path / "bin" / "sbatch", f'printf "%s\\n" "$@" > {tmp_path}/sbatch; cat > {tmp_path}/batch')
    text = "trap 'echo stopped by SIGTERM; exit 143' TERM; echo 1 steps/s; for i in $(seq 600); do sleep 0.1; done"
    python = quick_python(tmp_path, text)
    slurm = ["--launcher", "slurm", "--time", "60", "--partition", "low", "--gpus", "1"]
    code, _ = finish(sweep(runs, "Healthy", 3, options=slurm, PATH=path, PYTHON=python))
    called = (tmp_path / "sbatch").read_text().splitlines()
    assert code == 0
    expected = {"--requeue", "--open-mode=append", "--signal=B:USR1@120", "--array=0,1,2%2", "--time=60"}
    assert expected | {"--partition=low", "--gpus=1"} <= set(called)

    def log():
        return "".join(file.read_text() for file in runs.glob("*__2.log"))

    def begin():
        process = subprocess.Popen(
            ["bash", "batch"], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment(PATH=path, PYTHON=python, SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID="1"),
            start_new_session=True,
        )  # fmt: skip
        begun = log().count("steps/s")
        wait_until(lambda: log().count("steps/s") > begun)
        return process

    process = begin()
    process.send_signal(signal.SIGTERM)  # scancel: saved, and not queued again
    code, output = finish(process)
    assert code == 143 and "queued again" not in output and not (tmp_path / "scontrol").exists()
    assert "stopped by SIGTERM" in log()

    process = begin()
    process.send_signal(signal.SIGUSR1)  # to the batch script alone, as --signal=B:USR1 does
    code, output = finish(process)
    assert code == 143 and "queued again" in output
    assert (tmp_path / "scontrol").read_text().split() == ["requeue", "77_1"]
    assert log().count("stopped by SIGTERM") == 2
    assert not list(runs.glob("*__1")) and not list(runs.glob("*__3"))


def test_an_array_runs_the_list_as_it_was_submitted(tmp_path):
    script = shutil.copy(ROOT / "benchmark.sh", tmp_path)
    path = program(tmp_path / "bin" / "sbatch", f"cat > {tmp_path}/batch")
    sweep = [script, "base", "--runs", "its runs", "--launcher", "slurm"]
    python = quick_python(tmp_path, "echo ran")
    more = environment(PATH=path, PYTHON=python, SLURM_ARRAY_TASK_ID="11", SLURM_ARRAY_JOB_ID="77")
    subprocess.run(sweep, cwd=tmp_path, env=more, check=True)
    Path(script).write_text("exit 9")
    assert (tmp_path / "batch").read_text().startswith("#!")  # or sbatch refuses it
    for _ in range(2):  # one that is queued again after its run has ended does nothing
        subprocess.run(["bash", "batch"], cwd=tmp_path, env=more, check=True)
    (run,) = (tmp_path / "its runs").glob("*/")
    assert Path(f"{run}.log").read_text().count("ran") == 1
    assert re.fullmatch("Hopper-v5__ppo_mlp_gaussian__[0-9a-f]{8}__2", run.name)


def test_keep_copies_the_suites_runs_and_draws_them(tmp_path):
    shutil.copy(ROOT / "benchmark.sh", tmp_path)
    more = environment(PYTHON=str(tmp_path / "bin" / "python"))
    program(tmp_path / "bin" / "python", f'echo "$@" >> {tmp_path}/called')
    command = ["./benchmark.sh", "humanoid-4m"]
    printed = subprocess.check_output([*command, "--dry-run"], cwd=tmp_path, env=more, text=True)
    run = re.search(r"--run-dir (\S+)", printed)[1]
    (tmp_path / run).mkdir(parents=True)
    done = subprocess.run([*command, "--keep"], cwd=tmp_path, env=more, capture_output=True, text=True)
    assert done.returncode == 2 and "no run of humanoid-4m in runs has ended" in done.stderr
    (tmp_path / run / "result.json").write_text('{"status": "finished"}')
    subprocess.run([*command, "--keep"], cwd=tmp_path, env=more, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [
        f"plot_runs.py {run} --keep results/runs/humanoid-4m",
        "plot_runs.py results/runs/humanoid-4m --out results/figures/humanoid-4m.png",
    ]


@pytest.mark.parametrize(
    "folder, name", [(".", "benchmark.sh"), ("..", "./here/benchmark.sh"), ("b", "../benchmark.sh")]
)
def test_scripts_are_found_from_wherever_it_is_started(folder, name, tmp_path):
    (tmp_path / "here" / "b").mkdir(parents=True)
    shutil.copy(ROOT / "benchmark.sh", tmp_path / "here")
    at = tmp_path / "here" / folder
    output = subprocess.check_output(["bash", name, "base", "--dry-run"], cwd=at, env=environment(), text=True)
    scripts = {(at / line.split()[1]).resolve() for line in output.splitlines()}
    assert scripts == {(tmp_path / "here" / "ppo_mlp_gaussian.py").resolve()}


def test_a_python_that_is_not_there_ends_in_one_line(tmp_path):
    code, output = finish(sweep(tmp_path / "runs", "Healthy", 1, PYTHON="/nonexistent/python"))
    assert code == 2 and "/nonexistent/python can't be run" in output.splitlines()[-1]


@pytest.mark.parametrize("suite", SUITES)
def test_a_suites_commands_parse_and_are_those_of_the_kept_runs(suite, tmp_path, monkeypatch):
    code, output = finish(start(tmp_path / "runs", suite, "--dry-run"))
    assert code == 0
    wanted, parsed = {}, {}
    for line in output.splitlines():
        command, own = shlex.split(line.split("  # ")[0])[1:], {}
        for name in "env_id", "seed", "run_dir":  # the others are parsed once: it takes a while
            at = command.index(f"--{name.replace('_', '-')}")
            _, own[name] = command[at : at + 2]
            del command[at : at + 2]
        if tuple(command) not in parsed:
            monkeypatch.setattr(sys, "argv", command)
            file = Path(command[0]).resolve().relative_to(ROOT)
            module = importlib.import_module(".".join(file.with_suffix("").parts))
            module = getattr(module, "ppo", module)  # of results/memory_tasks.py
            parsed[tuple(command)] = vars(module.parse_args(getattr(module, "preset_args", module.Args)()))
        wanted[Path(own["run_dir"]).name] = parsed[tuple(command)] | own | {"seed": int(own["seed"])}
    assert len(wanted) == len(output.splitlines()), "two runs share a directory"
    for file in (ROOT / "results" / "runs" / suite).glob("*/args.json"):
        args, saved = wanted[file.parent.name], json.loads(file.read_text())
        compared = saved.keys() & args.keys() - {"run_dir", "num_workers", "cuda"}  # some kept runs had more flags
        assert {key: args[key] for key in compared} == {key: saved[key] for key in compared}
        assert json.loads((file.parent / "result.json").read_text())["status"] in ("finished", "diverged")


def test_the_tables_of_the_pages_are_those_of_the_kept_runs():
    made = set()
    for suite in (ROOT / "results" / "runs").iterdir():
        plot_runs.name_variants(runs := plot_runs.find_runs([suite]))
        made |= {line.replace("ppo_value_first ", "") for line in plot_runs.table(runs)}  # its page leaves the name out
    made |= set(h1_table.tables([ROOT / "results" / "runs" / suite for suite in ("h1", "interleaved-settings")]))
    pages = "".join(file.read_text() for file in (ROOT / "docs").glob("*.md"))
    heads = r"environment \| variant \| seeds \| mean|task \| ours, greedy"
    tables = re.findall(rf"^\| (?:{heads}).*\n(?:\|.*\n)+", pages, re.MULTILINE)
    assert len(tables) > 10
    assert {line for table in tables for line in table.splitlines()} <= made


def kept_run(directory, env_id, seed, score, more=None, **args):
    directory.mkdir(parents=True)
    args = {"env_id": env_id, "seed": seed, "exp_name": "ppo_x"} | args
    result = {"status": "finished", "mean_return_last_100": score, "eval_returns": [score, score + 2],
              "global_step": 1000, "args": args} | (more or {})  # fmt: skip
    (directory / "args.json").write_text(json.dumps(args))
    (directory / "result.json").write_text(json.dumps(result))
    rows = [(step, step / 100, score * step / 1000) for step in range(50, 1001, 50)]
    np.savetxt(directory / "curve.csv", rows, delimiter=",", header="global_step,minutes,episodic_return", comments="")


def rows(runs):
    lines = [line for line in plot_runs.table(runs) if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def test_table_has_the_numbers_of_a_hand_computed_one(tmp_path):
    for seed, score in enumerate([1, 2, 3, 4, 100], 1):
        kept_run(tmp_path / f"a{seed}", "A-v0", seed, float(score), gamma=0.9)
    for seed, score in enumerate([20.0, 40.0], 1):
        kept_run(tmp_path / f"b{seed}", "B-v0", seed, score, gamma=0.9)
    kept_run(tmp_path / "other", "B-v0", 1, 7.0, gamma=0.5, new_flag=3)
    runs = plot_runs.find_runs([tmp_path])
    plot_runs.name_variants(runs)
    many, other, few = rows(runs)
    # 5 seeds: mean 22, interquartile mean (2 + 3 + 4) / 3, evaluation 22 + 1 with the seeds' own deviation.
    assert many[:5] == ["A-v0", "ppo_x", "5", "22.0", "3.00"] and many[6:] == ["23.0 ± 43.6"]
    resampled = np.sort(np.random.default_rng(1).choice([1, 2, 3, 4, 100], (20000, 5)))[:, 1:4].mean(1)
    low, high = map(float, many[5].split(" to "))
    assert low == pytest.approx(np.percentile(resampled, 2.5), abs=0.5)
    assert high == pytest.approx(np.percentile(resampled, 97.5), abs=5)
    # Fewer: every seed, and no interquartile mean.
    assert few == ["B-v0", "ppo_x gamma=0.9", "2", "30.0", "-", "20.0, 40.0", "31.0 ± 14.1"]
    assert other == ["B-v0", "ppo_x gamma=0.5", "1", "7.00", "-", "7.00", "8.00"]


def test_of_ablations_only_what_was_changed_is_named(tmp_path):
    arms = [{}, {}, {}, {"window": 1}, {"state_coef": 0.0}, {"window": 1, "state_coef": 0.0}, {"window": 4}]
    for i, arm in enumerate(arms):
        kept_run(tmp_path / f"a{i}", "A-v0", i, 1.0, **{"window": 8, "state_coef": 0.1, "same": 1} | arm)
    runs = plot_runs.find_runs([tmp_path])
    plot_runs.name_variants(runs)
    names = {run.seed: run.variant for run in runs}
    # Of the five variants (three seeds of the first) three share state_coef=0.1; no window has more than two.
    assert names == {
        0: "ppo_x window=8", 1: "ppo_x window=8", 2: "ppo_x window=8", 3: "ppo_x window=1",
        4: "ppo_x window=8 state_coef=0.0", 5: "ppo_x window=1 state_coef=0.0", 6: "ppo_x window=4",
    }  # fmt: skip


def test_flags_that_not_every_run_knows_and_two_scripts_of_one_name_are_told_apart(tmp_path):
    for seed, arm in enumerate([{}, {"beta": 1}, {"beta": 2}, {"beta": 1, "gamma": 0.5}, {"beta": 1, "gamma": 0.7}]):
        kept_run(tmp_path / f"a{seed}", "A-v0", seed, 1.0, **{"gamma": 0.9} | arm)
    for seed in (1, 2):
        kept_run(tmp_path / f"b{seed}", "B-v0", seed, 1.0)
        result = json.loads((tmp_path / f"b{seed}" / "result.json").read_text())
        (tmp_path / f"b{seed}" / "result.json").write_text(json.dumps(result | {"script": f"ppo_{seed}"}))
    runs = plot_runs.find_runs([tmp_path])
    plot_runs.name_variants(runs)
    assert {run.seed: run.variant for run in runs if run.env_id == "A-v0"} == {
        0: "ppo_x", 1: "ppo_x", 2: "ppo_x beta=2", 3: "ppo_x gamma=0.5", 4: "ppo_x gamma=0.7"
    }  # fmt: skip
    assert [run.variant for run in runs if run.env_id == "B-v0"] == ["ppo_x script=ppo_1", "ppo_x script=ppo_2"]


def test_flags_that_follow_from_the_preset_are_not_named(tmp_path):
    presets = {"a": {"rate": 1, "clip": 0.1}, "b": {"rate": 2, "clip": 0.1}, "c": {"rate": 3, "clip": 0.2}}
    for seed, preset in enumerate("abc"):
        kept_run(tmp_path / preset, "A-v0", seed, 1.0, preset=preset, lam=0.9, **presets[preset])
    kept_run(tmp_path / "d", "A-v0", 3, 1.0, preset="c", lam=0.5, **presets["c"])
    runs = plot_runs.find_runs([tmp_path])
    plot_runs.name_variants(runs)
    names = {run.seed: run.variant for run in runs}
    assert names == {0: "ppo_x preset=a", 1: "ppo_x preset=b", 2: "ppo_x preset=c", 3: "ppo_x preset=c lam=0.5"}


def test_of_several_runs_of_one_seed_one_counts(tmp_path, capsys):
    for i in range(1, 6):
        kept_run(tmp_path / f"A__{i}", "A-v0", 1, float(i), num_workers=i)
    kept_run(tmp_path / "A__6", "A-v0", 1, 6.0, {"status": "unfinished"})
    kept_run(tmp_path / "other", "A-v0", 2, 10.0)
    kept_run(tmp_path / "second" / "other", "A-v0", 2, 10.0)  # as two suites may share runs
    (tmp_path / "other.log").write_text("beside the run, as benchmark.sh's are")
    runs = plot_runs.find_runs([tmp_path, tmp_path / "other.log"])
    plot_runs.name_variants(runs)
    ((_, _, seeds, mean, _, each, *_),) = rows(runs)
    assert (seeds, mean, each) == ("2", "7.50", "5.00, 10.0")  # the last that has ended
    left_out = [(tmp_path / "A__5", tmp_path / f"A__{i}") for i in (6, 1, 2, 3, 4)]
    left_out += [(tmp_path / "second" / "other", tmp_path / "other")]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"left out, as {used} has the same flags and seed: {run}" for used, run in left_out]
    plot_runs.keep(plot_runs.find_runs([tmp_path]), tmp_path / "kept")
    assert "not kept, as another run has its name" in capsys.readouterr().err
    assert (tmp_path / "kept" / "A__1").exists() and (tmp_path / "kept" / "other").exists()


def test_rows_of_runs_that_were_resumed_with_other_flags_or_differ_in_versions_are_marked(tmp_path):
    first, old, new = {"global_step": 0, "changed": {}, "commit": None}, {"torch": "2.11"}, {"torch": "2.13"}
    again = {"global_step": 5, "changed": {"eval_episodes": [10, 50]}, "commit": None}
    other = {"global_step": 9, "changed": {"gamma": [0.9, 0.8]}, "commit": "c"}
    seed2 = {"global_step": 9, "changed": {"seed": [1, 2]}, "commit": "c"}  # what was learned before is of another
    results = {
        "both": [{"starts": [first, again, other], "versions": old}, {"starts": [first], "versions": new}],
        "changed": [{"starts": [first], "versions": new}, {"starts": [first, seed2], "versions": new}],
        "older": [{"commit": "c", "versions": old}, {"commit": "d", "versions": old}, {}],
        "versions": [{"starts": [first, again], "versions": old}, {"commit": "d", "versions": new}],
    }
    for name, group in results.items():
        for seed, result in enumerate(group, 1):
            more = result | ({"run_dir": "/elsewhere"} if "starts" in result else {})
            kept_run(tmp_path / name / str(seed) / f"{name}{seed}", name, seed, 1.0, more)
    plot_runs.keep(plot_runs.find_runs([tmp_path]), tmp_path / "kept")
    for folder in (tmp_path / name for name in ("both", "changed", "older", "versions", "kept")):
        runs = plot_runs.find_runs([folder])
        plot_runs.name_variants(runs)
        expected = {"both": "ppo_x †‡", "changed": "ppo_x †", "older": "ppo_x", "versions": "ppo_x ‡"}
        variants = {row[0]: row[1] for row in rows(runs)}
        assert variants == {name: expected[name] for name in variants}
        explained = "".join(re.findall("^- ([†‡]): ", "\n".join(plot_runs.table(runs)), re.MULTILINE))
        assert explained == {"changed": "†", "older": "", "versions": "‡"}.get(folder.name, "†‡")
    assert "elsewhere" not in "".join(file.read_text() for file in (tmp_path / "kept").rglob("*.json"))


def test_an_evaluation_that_some_seeds_lack_says_of_how_many_it_is(tmp_path):
    for seed in (1, 2, 3):
        kept_run(tmp_path / f"a{seed}", "A-v0", seed, 10.0 * seed)
    result = json.loads((tmp_path / "a2" / "result.json").read_text())
    (tmp_path / "a2" / "result.json").write_text(json.dumps(result | {"eval_returns": None}))
    runs = plot_runs.find_runs([tmp_path])
    plot_runs.name_variants(runs)
    assert rows(runs)[0][6] == "21.0 ± 14.1 (2 of 3)"  # of 11 and 31


def test_while_a_seed_is_behind_every_curve_is_drawn(tmp_path):
    points = np.array([[step, step / 60, 1.0] for step in range(0, 1001, 10)])
    for shortest, lines in ((500, 7), (1000, 1)):  # with their mean
        runs = [
            plot_runs.Run(tmp_path, "A-v0", seed, {}, points[points[:, 0] <= (shortest if seed else 1000)],
                          "unfinished", 1.0, math.nan, "ours")
            for seed in range(6)
        ]  # fmt: skip
        plot_runs.draw(runs, {}, "steps", tmp_path / "figure.png")
        assert len(plot_runs.plt.gcf().axes[0].get_lines()) == lines


def test_a_torn_file_ends_in_one_line(tmp_path):
    kept_run(tmp_path / "a", "A-v0", 1, 1.0)
    (tmp_path / "a" / "result.json").write_text('{"status": ')
    with pytest.raises(SystemExit, match="result.json: Expecting value"):
        plot_runs.find_runs([tmp_path])


def test_a_resumed_runs_event_files_are_merged(tmp_path):
    """Three episodes, a stop after the second's checkpoint that takes the third back, two hours' pause, one more."""
    clock = [1000.0]
    with mock.patch("time.time", lambda: clock[0]):

        def write(purge_step, *episodes):
            with SummaryWriter(tmp_path, purge_step=purge_step) as writer:
                for seconds, step, episodic_return in episodes:
                    clock[0] += seconds
                    writer.add_scalar("charts/episodic_return", episodic_return, step)
                    writer.add_scalar("charts/SPS", 1, step)

        write(0, (60, 10, 1.0), (60, 20, 2.0), (60, 30, 3.0))
        clock[0] += 7200
        write(21, (60, 30, 30.0), (30, 40, 40.0))
    points, _ = plot_runs.read_events(tmp_path)
    np.testing.assert_allclose(points, [[10, 1, 1], [20, 2, 2], [30, 3, 30], [40, 3.5, 40]])


def test_every_point_of_a_long_run_is_read_and_at_most_200_are_kept(tmp_path):
    with SummaryWriter(tmp_path / "run") as writer:
        for step in range(1, 12001):  # more than TensorBoard's own reader keeps
            writer.add_scalar("charts/episodic_return", step % 60, step)
    places = {"run_dir": "/elsewhere", "resume": "/elsewhere"}
    (tmp_path / "run" / "args.json").write_text(json.dumps({"env_id": "A-v0", "seed": 1} | places))
    result = {"status": "finished", "global_step": 12000, "mean_return_last_100": 5.0, "args": places}
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    (run,) = plot_runs.find_runs([tmp_path])
    assert len(run.points) == 12000
    plot_runs.keep([run], tmp_path / "kept")
    (kept,) = plot_runs.find_runs([tmp_path / "kept"])
    assert len(kept.points) == 200
    np.testing.assert_allclose(kept.points[1:-1, 2], 29.5, atol=0.5)  # means over 60 steps
    assert kept.points[:, 0].max() <= 12000 and (np.diff(kept.points[:, 0]) > 0).all()
    assert "elsewhere" not in "".join(file.read_text() for file in (tmp_path / "kept").rglob("*.json"))


def test_a_published_result_for_some_arguments_stands_beside_runs_that_have_them(tmp_path):
    always, post = {"label": "always"}, {"label": "post", "where": {"preset": "post", "gamma": 0.5}}
    references = {"A-v0": [always, post], "B-v0": [post]}
    run = plot_runs.Run(tmp_path, "A-v0", 1, {"preset": "post", "gamma": 0.9}, None, "finished", 0.0, 0.0)
    assert plot_runs.published(references, "A-v0", [run]) == [always]
    run.args["gamma"] = 0.5
    assert plot_runs.published(references, "A-v0", [run]) == [always, post]
    assert plot_runs.published(references, "B-v0", [run]) == []


def test_a_published_curve_is_drawn_over_steps_as_far_as_the_runs_reach(tmp_path):
    points = np.array([[step, step / 60, 1.0] for step in range(0, 3001, 100)])
    run = plot_runs.Run(tmp_path, "A-v0", 1, {}, points, "finished", 1.0, math.nan, "ours")
    references = {"A-v0": [{"label": "theirs", "curve": [[0, 5.0], [1000, 6.0], [3020, 8.0], [3100, 9.0]]}]}
    for axis, drawn in (("steps", [[[0, 5.0], [1000, 6.0], [3020, 8.0]]]), ("minutes", [])):
        plot_runs.draw([run], references, axis, tmp_path / "figure.png")
        lines = [line for line in plot_runs.plt.gcf().axes[0].get_lines() if line.get_label() == "theirs"]
        assert [line.get_xydata().tolist() for line in lines] == drawn


def test_seeds_of_another_speed_are_all_drawn_to_their_end(tmp_path):
    """Over minutes; an IQM would end with the fastest."""
    steps = np.arange(0, 1001.0, 10)
    runs = [
        plot_runs.Run(
            tmp_path, "A-v0", seed, {}, np.stack([steps, seed * steps, steps], 1), "finished", 1.0, 1.0, "ours"
        )
        for seed in range(1, 7)
    ]
    for axis, lines in (("steps", 1), ("minutes", 7)):
        plot_runs.draw(runs, {}, axis, tmp_path / "figure.png")
        assert len(plot_runs.plt.gcf().axes[0].get_lines()) == lines


def test_what_is_published_far_outside_is_named_and_does_not_flatten_the_curves(tmp_path):
    points = np.array([[step, step / 60, step / 100] for step in range(0, 1001, 10)])  # returns of 0 to 10
    runs = [plot_runs.Run(tmp_path, "module:A-v0", 1, {}, points, "finished", 1.0, math.nan, "ours")]
    curve = {"label": "curve", "curve": [[0, 5.0], [1000, 900.0]]}
    references = {"module:A-v0": [{"label": "near", "return": 15.0}, {"label": "far", "return": 657.0}, curve]}
    plot_runs.draw(runs, references, "steps", tmp_path / "figure.png")
    panel = plot_runs.plt.gcf().axes[0]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["near", "far: 657", "curve"]
    assert 15 < panel.get_ylim()[1] < 25
    assert panel.get_title() == "A-v0"  # the module would not fit


def test_cleanrl_runs_unfinished_ones_and_the_figure(tmp_path, capsys, monkeypatch):
    table = "|param|value|\n|-|-|\n|env_id|A-v0|\n|seed|3|\n|exp_name|ppo_theirs|"
    with SummaryWriter(tmp_path / "theirs") as writer:
        writer.add_text("hyperparameters", table)
        for step in range(200):
            writer.add_scalar("charts/episodic_return", step, step)
    for seed in range(1, 7):
        kept_run(tmp_path / f"ours{seed}", "A-v0", seed, float(seed))
    with SummaryWriter(tmp_path / "begun"):
        pass
    (tmp_path / "begun" / "args.json").write_text(json.dumps({"env_id": "A-v0", "seed": 9, "exp_name": "ppo_x"}))
    for axis in ("steps", "minutes"):
        monkeypatch.setattr(sys, "argv", ["plot_runs.py", str(tmp_path), "--x", axis, "--out", str(tmp_path / "f.png")])
        plot_runs.main()
        output = capsys.readouterr().out
        assert "| A-v0 | ppo_theirs | 1 | 150 |" in output and "| A-v0 | ppo_x | 6 | 3.50 | 3.50 |" in output
        assert f"- unfinished: {tmp_path / 'begun'}" in output
        assert f"- no finished episode: {tmp_path / 'begun'}" in output
        assert (tmp_path / "f.png").stat().st_size > 10000
    plot_runs.keep(plot_runs.find_runs([tmp_path]), tmp_path / "kept")
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [f"ours{seed}" for seed in range(1, 7)]
    errors = capsys.readouterr().err
    assert [f"{tmp_path / name}\n" in errors for name in ("theirs", "begun", "ours1")] == [True, True, False]


def test_shellcheck_has_nothing_to_say():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run([shutil.which("shellcheck", path=path), ROOT / "benchmark.sh"], check=True)
