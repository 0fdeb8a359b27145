"""The flagship on the machines of a Ray cluster: the same run as without, and what can go wrong there."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BATCH, TESTS, flagship, load, resume_args, small_args

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs requirements-ray.txt")

ENDLESS = 10**6  # iterations
HALVES = [slice(0, None, 2), slice(1, None, 2)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two machines of one core each, which are this one; their processes find the modules of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


def ray_args(directory, address, *inputs, **changes):
    return small_args(flagship, directory, *inputs, ray=address, hidden_size=16, **changes)


def start(directory, address, *flags, env="Healthy", script=flagship.__file__, **variables):
    """The flagship as a process of its own."""
    args = vars(ray_args(directory, address, ENDLESS, env))
    names = "env_id num_envs num_steps num_minibatches update_epochs total_timesteps hidden_size ray run_dir".split()
    command = [
        sys.executable,
        script,
        *(f"--{name.replace('_', '-')}={args[name]}" for name in names),
        *flags,
    ]
    path = os.pathsep.join([*variables.pop("path", []), str(TESTS)])
    return subprocess.Popen(
        [*command, "--eval-episodes=0", "--no-cuda"], env=os.environ | {"PYTHONPATH": path} | variables, text=True,
        stdout=open(directory.with_suffix(".out"), "w"), stderr=open(directory.with_suffix(".err"), "w"),
    )  # fmt: skip


def wait_for_iterations(directory, process, count=2):
    end = time.monotonic() + 120
    while directory.with_suffix(".out").read_text().count("steps/s") < count:
        assert process.poll() is None, directory.with_suffix(".err").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


def last_line(directory):
    return directory.with_suffix(".err").read_text().splitlines()[-1]


def actors(cluster):
    """Processes of this cluster that hold environments."""
    raylets, found = {x.process.pid for node in cluster.list_all_nodes() for x in node.all_processes["raylet"]}, []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent in raylets and b"ray::Machine" in (process / "cmdline").read_bytes():
                found.append(process)
    return found


@pytest.mark.parametrize("num_envs", [7, pytest.param(4, marks=pytest.mark.slow)])
def test_run_on_two_machines_is_the_run_on_one(cluster, tmp_path, num_envs):
    """Three of seven environments are on the first; episodes are in one order, and parameters equal bit for bit."""
    states = []
    for address in (cluster.address, None):
        args = ray_args(
            tmp_path / f"run{address is None}", address, num_envs=num_envs, total_timesteps=16 * num_envs * 5
        )
        result = flagship.train(args)
        assert result["global_step"] == args.total_timesteps
        states.append(load(Path(args.run_dir)))
    found, expected = states
    assert len(found["recent_returns"]) > 5 and found["recent_returns"] == expected["recent_returns"]
    assert all(torch.equal(found["model"][name], expected["model"][name]) for name in expected["model"])


@pytest.mark.slow
def test_machines_share_the_environments_by_their_cores_and_each_is_what_it_is_on_one(cluster):
    node = cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    make = flagship.partial(flagship.make_env, "misbehaving:Healthy-v0")
    try:
        with flagship.RayVecEnv(cluster.address, make, 13, 0, 1) as envs:
            parts = [(part.start, part.stop) for part, *_ in envs.machines]
            with flagship.SubprocVecEnv(make, 13, 1, 1) as plain:
                assert (envs.reset() == plain.reset()).all()
                actions, ended = np.linspace(-1, 1, 26).reshape(13, 2), []
                for rows in HALVES * 25:
                    for x in (envs, plain):
                        x.send(actions[rows], rows=rows)
                    found, expected = ([*x.receive(rows), x.final_obs[rows]] for x in (envs, plain))
                    assert all((x == y).all() for x, y in zip(found, expected)) and envs.episodes == plain.episodes
                    ended += envs.episodes
                assert {env for env, *_ in ended} == set(range(13))
    finally:
        cluster.remove_node(node)
    sizes = [last - first for first, last in parts]
    assert sum(sizes) == 13 and parts[0][0] == 0 and sorted(sizes)[-1] >= 5
    assert all(last == first for (_, last), (first, _) in zip(parts, parts[1:])) and not any(x % 2 for x, _ in parts)


def test_fault_on_another_machine_has_its_traceback_its_index_and_its_host(cluster, tmp_path):
    run = tmp_path / "run"
    process = start(run, cluster.address, env="RaiseInStep")
    assert process.wait(120) == 1
    *_, last = lines = run.with_suffix(".err").read_text().splitlines()
    raised = r"environment [13] raised RuntimeError: the leg is broken"
    assert re.match(rf"{raised} \(on .+, counted from environment [02]\); go on with: .+", last)
    assert any("misbehaving.py" in line for line in lines)
    assert load(run)["iteration"] == 2


@pytest.mark.slow
def test_machine_that_dies_ends_the_run_and_the_others_go_on(cluster, tmp_path):
    node, run = cluster.add_node(num_cpus=1), tmp_path / "run"
    cluster.wait_for_nodes()
    process = start(run, cluster.address, "--num-envs=6", "--num-minibatches=2")
    wait_for_iterations(run, process)
    killed = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    assert process.wait(60) == 1 and time.monotonic() - killed < 10
    assert re.match(r"environments \d to \d, on .+, are lost: .+; go on with: .+ --resume ", last_line(run))
    assert "Traceback" not in run.with_suffix(".err").read_text()
    checkpoint = load(run)
    assert checkpoint["iteration"] >= 2 and checkpoint["global_step"] == checkpoint["iteration"] * 6 * 16
    total = checkpoint["global_step"] + 6 * 16
    while True:  # the cluster needs a few seconds to see that the machine is gone
        try:
            result = flagship.train(resume_args(flagship, run, total_timesteps=total, ray=cluster.address))
            break
        except SystemExit as lost:
            assert "are lost" in str(lost) and time.monotonic() - killed < 60, lost
    assert result["global_step"] == total


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_leaves_no_process_on_any_machine(cluster, tmp_path, signum):
    run = tmp_path / "run"
    process = start(run, cluster.address)
    wait_for_iterations(run, process)
    assert len(actors(cluster)) == 2
    process.send_signal(signum)
    sent = time.monotonic()
    assert process.wait(60) == 128 + signum and time.monotonic() - sent < 10
    assert f"stopped by {signum.name}" in last_line(run)
    assert load(run)["global_step"] == load(run)["iteration"] * BATCH >= 2 * BATCH
    while actors(cluster):
        assert time.monotonic() - sent < 20
        time.sleep(0.1)


@pytest.mark.slow
def test_what_a_machine_lacks_is_named(cluster, tmp_path):
    """A module that only the learner finds."""
    (tmp_path / "only_here.py").write_text("import misbehaving\n")
    run = tmp_path / "run"
    process = start(run, cluster.address, "--env-id=only_here:Healthy-v0", path=[str(tmp_path)])
    assert process.wait(120) == 1
    assert "only_here" in last_line(run) and re.search(r"\(on .+\)", last_line(run)), last_line(run)
    assert "Traceback" not in run.with_suffix(".err").read_text()


@pytest.mark.slow
def test_package_that_a_machine_lacks_is_named(cluster, tmp_path):
    """The learner has it. The script is a copy whose name has a dot."""
    run, copy = tmp_path / "run", tmp_path / "ppo_v1.2.py"
    lacks = 'import tyro\nif "RAY_RAYLET_PID" in os.environ:\n    import not_there\n'
    copy.write_text(Path(flagship.__file__).read_text().replace("import tyro\n", lacks, 1))
    assert start(run, cluster.address, script=copy).wait(120) == 1
    assert "No module named 'not_there'" in last_line(run), last_line(run)


@pytest.mark.slow
def test_cluster_without_cores_is_one_line(tmp_path):
    empty = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        process = start(tmp_path / "run", empty.address)
        assert process.wait(60) == 1
    finally:
        empty.shutdown()
    assert re.match("--ray [0-9.:]+: no machine has a core; ", last_line(tmp_path / "run"))


def test_cluster_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="--ray 127.0.0.1:1: .*docs/clusters.md"):
        flagship.train(ray_args(tmp_path / "run", "127.0.0.1:1"))
