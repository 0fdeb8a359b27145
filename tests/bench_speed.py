"""Speed against peers and against the limit: prints a Markdown table of ratios, all measured in one run.

    python tests/bench_speed.py                              # what needs no peers
    python tests/bench_speed.py --only base value-first atari --sb3-python sb3-env/bin/python \
        --cleanrl-python cleanrl-env/bin/python --cleanrl cleanrl/cleanrl/ppo_continuous_action.py

Run it on a machine that does nothing else. The contenders take turns (A B A B ...) for `--rounds` rounds; the table
gives the medians of the speeds, and the median, minimum and maximum of the rounds' ratios.

The peers live in environments of their own:

    python -m venv sb3-env
    sb3-env/bin/pip install torch==2.13.0 stable-baselines3 sb3-contrib "gymnasium[mujoco]" mujoco==3.1.6
    python -m venv cleanrl-env
    cleanrl-env/bin/pip install torch==2.13.0 gymnasium==0.29.1 mujoco==3.1.6 imageio tyro tensorboard \
        ale-py==0.9.0 opencv-python-headless
    git clone https://github.com/vwxyzjn/cleanrl

CleanRL's script needs Gymnasium 0.29 (a wrapper's signature has changed since), which has HalfCheetah-v4, not v5: the
same model and the same 17 observations. Only the standard library is imported at the top, so that a peer's
interpreter can run this file too.
"""

import argparse
import itertools
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
NUM_ENVS = 32  # in `vecenv` and `flagship`
NUM_STEPS, ITERATIONS = 64, 8  # the flagship's steps an iteration, and its iterations, of which the first is not timed
SHARED_BATCH = "--num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10"  # `base`: 2048 steps, 64 at once


class PeerError(RuntimeError):
    """A contender gave no result."""


def compare(rounds, contenders):
    """{name: function -> steps/s} -> {name: [steps/s of each round]}; the contenders take turns."""
    speeds = {name: [] for name in contenders}
    for i in range(rounds):
        for name, measure in contenders.items():
            speeds[name].append(measure())
            print(f"round {i + 1}/{rounds}  {name}: {speeds[name][-1]:.0f} steps/s", file=sys.stderr, flush=True)
    return speeds


def table(speeds, rows):
    """Prints the rows (ours, peer or None)."""
    print("| ours | steps/s | against | steps/s | ratio (min-max) |\n|-|-|-|-|-|")
    for ours, peer in rows:
        cells = [ours, f"{statistics.median(speeds[ours]):.0f}"]
        if peer is not None:
            ratios = [a / b for a, b in zip(speeds[ours], speeds[peer])]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            cells += [peer, f"{statistics.median(speeds[peer]):.0f}", spread]
        print(f"| {' | '.join(cells + [''] * (5 - len(cells)))} |", flush=True)
    print()


def machine(args):
    import torch

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    print(f"{model}, {CORES} cores; {platform.system()}, load {os.getloadavg()[0]:.1f}; {args.rounds} rounds\n")
    show = "import sys, torch; from importlib.metadata import version as v; " + (
        "print(sys.version.split()[0], *(f'{p} {v(p)}' for p in sys.argv[1:]), f'threads {torch.get_num_threads()}')"
    )
    packages = ["torch", "numpy", "gymnasium", "mujoco"]
    peers = {"ours": sys.executable, "SB3": args.sb3_python, "CleanRL": args.cleanrl and args.cleanrl_python}
    for name, python in peers.items():
        if python and ({"base", "value-first", "atari", "hopper"} & set(args.only) or name == "ours"):
            names = packages + ["stable-baselines3"] * (name == "SB3")
            shown = subprocess.run([python, "-c", show, *names], capture_output=True, text=True)
            print(f"- {name}: Python {shown.stdout.strip() or shown.stderr.strip().splitlines()[-1]}")
    print(f"- GPU: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}\n", flush=True)


# Environments


def load(script):
    """One of the scripts as a module, in this process and in those it starts."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return import_module(script)


def draw_actions(space, steps, num_envs, concentration, seed):
    """[steps, num_envs, act_dim] from Beta(c, c) on the bounds: 1 is uniform, 22 what the flagship starts with."""
    import numpy as np

    x = np.random.default_rng(seed).beta(concentration, concentration, (steps, num_envs, *space.shape))
    return (space.low + x * (space.high - space.low)).astype(space.dtype)


def bare_worker(script, env_id, num_envs, warmup, steps, concentration, seed, barrier, results):
    envs = [load(script).make_env(env_id) for _ in range(num_envs)]
    actions = draw_actions(envs[0].action_space, warmup + steps, num_envs, concentration, seed)
    for i, env in enumerate(envs):
        env.reset(seed=1000 * seed + i)
    for step in range(warmup + steps):
        if step == warmup:
            barrier.wait(300)  # not for ever: another worker may have failed
            start = time.perf_counter()
        for env, action in zip(envs, actions[step]):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
    results.put(num_envs * steps / (time.perf_counter() - start))


def bare(script, env_id, warmup, steps, concentration):
    """The limit: bare loops over the same wrapped environments, one process a core at the same time, summed."""
    context = multiprocessing.get_context("spawn")
    processes, workers = min(CORES, NUM_ENVS), []
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    shares = [NUM_ENVS // processes + (i < NUM_ENVS % processes) for i in range(processes)]
    for seed, num_envs in enumerate(shares):
        arguments = (script, env_id, num_envs, warmup, steps, concentration, seed, barrier, results)
        workers.append(context.Process(target=bare_worker, args=arguments, daemon=True))
        workers[-1].start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise PeerError(f"bare stepping of {env_id} failed")
    return sum(results.get() for _ in workers)


def vecenv(args):
    """SubprocVecEnv against AsyncVectorEnv and bare loops: HalfCheetah-v5, uniformly random actions."""
    import gymnasium as gym

    base, warmup, steps = load("ppo_mlp_gaussian"), 50, 1000  # 1000: with a reset
    make_env = partial(base.make_env, "HalfCheetah-v5")
    peer = gym.vector.AsyncVectorEnv([make_env] * NUM_ENVS)  # its default settings, shared memory among them
    with base.SubprocVecEnv(make_env, NUM_ENVS, 0, 1) as ours:
        actions = draw_actions(ours.single_action_space, warmup + steps, NUM_ENVS, 1, 0)

        def measure(envs):
            envs.reset()
            for step in range(warmup + steps):
                if step == warmup:
                    start = time.perf_counter()
                envs.step(actions[step])
            return NUM_ENVS * steps / (time.perf_counter() - start)

        names = (f"SubprocVecEnv, {len(ours.workers)} workers", "AsyncVectorEnv", f"bare loops, {CORES} processes")
        limit = partial(bare, "ppo_mlp_gaussian", "HalfCheetah-v5", warmup, steps, 1)
        speeds = compare(args.rounds, dict(zip(names, (partial(measure, ours), partial(measure, peer), limit))))
    peer.close()
    print(f"## vecenv: {NUM_ENVS} HalfCheetah-v5, {steps} steps each and their resets, random actions\n")
    table(speeds, [(names[0], names[1]), (names[0], names[2])])


# Whole trainings


def train(command, mark, batch_size, seconds=None, **environment):
    """Steps/s of a training process, everything included, from the end of its first iteration on.

    It prints a line with `mark` at the end of each iteration. After `seconds` it is stopped; without, it ends itself.
    """
    times, tail = [], []
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*map(str, command)], stdout=-1, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
        )
        for line in process.stdout:
            tail = tail[-9:] + [line]
            if mark in line:
                times.append(time.perf_counter())
                if seconds is not None and len(times) > 1 and times[-1] - times[0] >= seconds:
                    break
        process.terminate()
        process.communicate()
    if len(times) < 2:
        raise PeerError(f"no result from {' '.join(map(str, command))}:\n{''.join(tail)}")
    return batch_size * (len(times) - 1) / (times[-1] - times[0])


def run_script(script, flags, batch_size, seconds=None, shares=None):
    """Steps/s of one of our scripts; the rollout's steps/s and {part: share of the time} are appended to `shares`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / f"{script}.py", "--eval-episodes", 0, "--run-dir", f"{folder}/run"]
        speed = train([*command, *flags.split()], " steps/s", batch_size, seconds)
        if shares is not None:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            events = EventAccumulator(f"{folder}/run")
            events.Reload()
            seconds = {x: sum(s.value for s in events.Scalars(f"time/{x}")[1:]) for x in ("rollout", "update")}
            iterations = len(events.Scalars("time/rollout")) - 1
            total = sum(seconds.values())
            shares.append((batch_size * iterations / seconds["rollout"], {x: seconds[x] / total for x in seconds}))
    return speed


def run_sb3(vec_env, network):
    """Executed by the peer's interpreter: Stable-Baselines3's PPO, prints a line at the end of each iteration.

    With a network "two LSTMs" or "one LSTM" it is SB3-contrib's RecurrentPPO on Hopper, at its defaults or with the
    network of ppo_lstm_atari.py.
    """
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    class Mark(BaseCallback):
        def _on_rollout_start(self):
            if self.num_timesteps:
                print("iteration", self.num_timesteps, flush=True)

        def _on_step(self):
            return True

    torch.set_num_threads(1)
    kind = {"SubprocVecEnv": SubprocVecEnv, "DummyVecEnv": DummyVecEnv}[vec_env]
    envs = VecNormalize(make_vec_env("Hopper-v5" if network else "HalfCheetah-v5", 8, vec_env_cls=kind))
    if network:
        from sb3_contrib import RecurrentPPO

        ours = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False, "net_arch": []}
        model = RecurrentPPO("MlpLstmPolicy", envs, policy_kwargs=ours if network == "one LSTM" else {}, device="cpu")
    else:
        model = PPO("MlpPolicy", envs, n_steps=256, batch_size=64, n_epochs=10, device="cpu")
    model.learn(100_000_000, callback=Mark())


def base(args):
    """Whole training of the base against Stable-Baselines3 and CleanRL: HalfCheetah-v5, 2048 / 32 / 10."""
    ours, contenders, rows = ("base, eager", "base, --compile"), {}, []
    for name, flag in zip(ours, ("", "--compile")):
        flags = f"{SHARED_BATCH} --total-timesteps 100000000 --no-cuda {flag}"
        contenders[name] = partial(run_script, "ppo_mlp_gaussian", flags, 2048, args.seconds)
    if args.sb3_python:
        for vec_env in ("SubprocVecEnv", "DummyVecEnv"):
            name = f"SB3 PPO, 8 in {vec_env}, VecNormalize, 1 thread"
            command = [args.sb3_python, __file__, "--run-sb3", vec_env]
            contenders[name] = partial(train, command, "iteration", 2048, args.seconds)
            rows += [(ours[0], name), (ours[1], name)]
    else:
        print("SB3 is left out: --sb3-python was not given\n")
    if args.cleanrl:
        command = [args.cleanrl_python, Path(args.cleanrl).resolve(), "--env-id", "HalfCheetah-v4", "--no-cuda"]
        command += ["--total-timesteps", 100000000]
        for name, environment in ("CleanRL", {}), ("CleanRL, OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}):
            contenders[name] = partial(train, command, "SPS:", 2048, args.seconds, **environment)
            rows += [(ours[0], name), (ours[1], name)]
    else:
        print("CleanRL is left out: --cleanrl was not given\n")
    speeds = compare(args.rounds, contenders)
    print("## base: whole training on the CPU, HalfCheetah-v5, batch 2048 / 32 minibatches / 10 epochs\n")
    print("Steps/s: iterations after the first, by the times of the lines that each process prints at their ends.\n")
    table(speeds, rows or [(name, None) for name in ours])


def atari(args):
    """Whole training of the recurrent script against CleanRL's, on the GPU where there is one: Breakout, 8 x 128."""
    contenders, rows, shares = {}, [], {}
    for name, flags in ("LSTM, eager", ""), ("LSTM, --compile", "--compile"), ("GRU, eager", "--rnn gru"):
        shares[name] = []
        contenders[name] = partial(run_script, "ppo_lstm_atari", flags, 1024, args.seconds, shares[name])
    if args.cleanrl:
        script = Path(args.cleanrl).resolve().with_name("ppo_atari_lstm.py")
        # ale-py registers its games when it is imported, which CleanRL leaves to older versions' plug-in.
        start = "import ale_py, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        command, path = [args.cleanrl_python, "-c", start, script], str(script.parent.parent)  # cleanrl_utils
        contenders["CleanRL, LSTM"] = partial(train, command, "SPS:", 1024, args.seconds, PYTHONPATH=path)
        rows = [(name, "CleanRL, LSTM") for name in shares]
    else:
        print("CleanRL is left out: --cleanrl was not given\n")
    speeds = compare(args.rounds, contenders)
    print("## atari: whole training, BreakoutNoFrameskip-v4, 8 environments x 128 steps, 4 minibatches, 4 epochs\n")
    table(speeds, rows or [(name, None) for name in shares])
    print_shares(shares)


def hopper(args):
    """Whole training of the recurrent script against SB3-contrib's RecurrentPPO: Hopper-v5, 8 x 128, 8 / 10."""
    flags = "--env-id Hopper-v5 --num-envs 8 --num-steps 128 --num-minibatches 8 --update-epochs 10 --no-cuda"
    contenders, rows, shares = {}, [], {}
    for name, flag in ("LSTM", ""), ("GRU", "--rnn gru"):
        run, shares[name] = f"{flags} --norm-obs --norm-reward --total-timesteps 100000000 {flag}", []
        contenders[name] = partial(run_script, "ppo_lstm_atari", run, 1024, args.seconds, shares[name])
    if args.sb3_python:
        for vec_env, network in itertools.product(("SubprocVecEnv", "DummyVecEnv"), ("two LSTMs", "one LSTM")):
            name = f"SB3-contrib RecurrentPPO, {network}, 8 in {vec_env}, 1 thread"
            command = [args.sb3_python, __file__, "--run-sb3", vec_env, "--sb3-network", network]
            contenders[name] = partial(train, command, "iteration", 1024, args.seconds)
            rows += [("LSTM", name), ("GRU", name)]
    else:
        print("SB3-contrib is left out: --sb3-python was not given\n")
    speeds = compare(args.rounds, contenders)
    print("## hopper: whole training on the CPU, Hopper-v5, 8 environments x 128 steps, 8 minibatches, 10 epochs\n")
    table(speeds, rows or [(name, None) for name in shares])
    print_shares(shares)


def comb(args):
    """Whole training of the comb against the base's, same setting: HalfCheetah-v5, 2048 / 32 / 10."""
    contenders, rows = {}, []
    for mode, flag in (("eager", ""), ("--compile", " --compile")):
        for name, script in (("base", "ppo_mlp_gaussian"), ("comb", "ppo_comb_dist")):
            flags = f"{SHARED_BATCH} --total-timesteps 100000000 --no-cuda{flag}"
            contenders[f"{name}, {mode}"] = partial(run_script, script, flags, 2048, args.seconds)
        rows.append((f"comb, {mode}", f"base, {mode}"))
    speeds = compare(args.rounds, contenders)
    print("## comb: whole training on the CPU, HalfCheetah-v5, batch 2048 / 32 minibatches / 10 epochs\n")
    table(speeds, rows)


def flagship(args):
    """The flagship's rollout against bare loops with the same actions, and its whole training."""
    script = "ppo_interleaved_gru_beta"
    batch_size, contenders, rows, shares = NUM_ENVS * NUM_STEPS, {}, [], {}
    flags = f"--num-envs {NUM_ENVS} --num-steps {NUM_STEPS} --no-cuda"
    # Without learning the policy keeps its initial noise, close to Beta(22, 22): the bare loops can draw the same.
    flags += f" --learning-rate 0 --total-timesteps {batch_size * ITERATIONS}"
    for env_id in ("h1hand-walk-v0", "Humanoid-v5"):
        humanoid_bench = env_id.startswith("h1")
        if humanoid_bench and util.find_spec("humanoid_bench") is None:
            print("h1hand-walk-v0 is left out: HumanoidBench is not installed\n")
            continue
        for flag in ("",) if humanoid_bench else ("", " --compile"):
            name = f"training, {env_id},{flag or ' eager'}"
            shares[name] = []
            run = f"{flags} --env-id {env_id}{flag}"
            contenders[name] = partial(run_script, script, run, batch_size, None, shares[name])
            rows.append((name, None))
            rows.append((f"rollout of {name}", f"bare loops, {env_id}"))
        # The same steps of the episodes as in the iterations that count: those after the first.
        contenders[f"bare loops, {env_id}"] = partial(bare, script, env_id, NUM_STEPS, NUM_STEPS * (ITERATIONS - 1), 22)
    speeds = compare(args.rounds, contenders)
    print(f"## flagship on the CPU: {NUM_ENVS} environments x {NUM_STEPS} steps, else its defaults\n")
    for name, values in shares.items():
        speeds[f"rollout of {name}"] = [speed for speed, _ in values]
    table(speeds, rows)
    print_shares(shares)


def cluster(args):
    """The flagship's training on simulated machines of a Ray cluster, whose environments sleep instead of stepping."""
    if util.find_spec("ray") is None:
        print("## cluster\n\nRay is not installed (requirements-ray.txt).\n")
        return
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    shares, rows, speeds = {}, [], {}
    for machines in (1, 2, 4, 8):
        name, size = f"{machines} machine{'s' * (machines > 1)}", NUM_ENVS * machines * NUM_STEPS
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(machines - 1):
            nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        flags = f"--env-id sleeping:Sleeping-v0 --ray {nodes.address} --num-workers 1 --num-envs {NUM_ENVS * machines}"
        flags += f" --num-steps {NUM_STEPS} --total-timesteps {size * ITERATIONS}"
        shares[name] = []
        run = partial(run_script, "ppo_interleaved_gru_beta", flags, size, None, shares[name])
        speeds |= compare(args.rounds, {name: run})
        speeds[f"rollout on {name}"] = [speed for speed, _ in shares[name]]
        rows += [(f"rollout on {name}", "rollout on 1 machine"), (name, "1 machine")]
        nodes.shutdown()
    print(f"## cluster: machines of 16 cores, {NUM_ENVS} environments each, which sleep 2 ms of a core a step\n")
    table(speeds, rows)
    print_shares(shares)


def value_first(args):
    """Value-first's whole training against CleanRL's ppo.py: CartPole."""
    contenders, rows = {}, []
    for order in ("joint", "value-first"):
        for name in ("eager", "--compile", "--num-envs 16 --num-steps 32 --compile"):  # a batch is 512 steps in each
            flags = f"--order {order} --total-timesteps 100000000 --no-cuda "
            flags += name.removeprefix("eager")
            contenders[f"{order}, {name}"] = partial(run_script, "ppo_value_first", flags, 512, args.seconds)
    if args.cleanrl:
        command = [args.cleanrl_python, Path(args.cleanrl).resolve().with_name("ppo.py"), "--no-cuda"]
        command += ["--total-timesteps", 100000000]
        contenders["CleanRL"] = partial(train, command, "SPS:", 512, args.seconds)
        rows = [(ours, "CleanRL") for ours in contenders if ours != "CleanRL"]
    else:
        print("CleanRL is left out: --cleanrl was not given\n")
    speeds = compare(args.rounds, contenders)
    print("## value-first: whole training on the CPU, CartPole-v1, batch 512 / 4 minibatches / 4 epochs\n")
    table(speeds, rows or [(ours, None) for ours in contenders])


def gpu(args):
    """Whole trainings on the GPU, against the same on the CPU and compiled against eager."""
    import torch

    if not torch.cuda.is_available():
        print("## gpu\n\nThere is no GPU here.\n")
        return
    humanoid = f"--env-id Humanoid-v5 --num-envs 128 --num-steps {NUM_STEPS}"
    runs = {
        "base, HalfCheetah-v5": ("ppo_mlp_gaussian", SHARED_BATCH, 2048, 15),
        "recurrent, Breakout": ("ppo_lstm_atari", "", 1024, 10),
        "flagship, Humanoid-v5": ("ppo_interleaved_gru_beta", humanoid, 128 * NUM_STEPS, 10),
    }
    contenders, rows, shares = {}, [], {}
    for run, (script, flags, size, iterations) in runs.items():
        for device, flag in {"CPU": "--no-cuda", "GPU": "", "GPU, --compile": "--compile"}.items():
            name = f"{run}, {device}"
            shares[name] = []
            run_flags = f"{flags} --total-timesteps {size * iterations} {flag}"
            contenders[name] = partial(run_script, script, run_flags, size, None, shares[name])
        rows += [(f"{run}, GPU", f"{run}, CPU"), (f"{run}, GPU, --compile", f"{run}, GPU")]
    speeds = compare(args.rounds, contenders)
    print(f"## gpu: whole trainings, {torch.cuda.get_device_name()} and {CORES} cores\n")
    table(speeds, rows)
    print_shares(shares)


def kl(args):
    """Whole training of the adaptive KL script's preset `post` against the base's: HalfCheetah-v5."""
    base = ("ppo_mlp_gaussian", f"{SHARED_BATCH} --total-timesteps {2048 * 20}", 2048)
    post = ("ppo_kl_adaptive", f"--total-timesteps {5000 * 8}", 5000)
    contenders, shares = {}, {}
    for run, (script, flags, batch_size) in {"base": base, "adaptive KL, preset post": post}.items():
        shares[run] = []
        contenders[run] = partial(run_script, script, f"{flags} --no-cuda", batch_size, None, shares[run])
    speeds = compare(args.rounds, contenders)
    print("## kl: whole training on the CPU, HalfCheetah-v5, iterations of 5 episodes against the base's 2048 steps\n")
    table(speeds, [("adaptive KL, preset post", "base")])
    print_shares(shares)


def print_shares(shares):
    for name, values in shares.items():
        parts = {part: statistics.median(share[part] for _, share in values) for part in values[0][1]}
        print(f"- {name}: of the time " + ", ".join(f"{share:.0%} {part}" for part, share in parts.items()))
    print(flush=True)


def main():
    sections = {
        "vecenv": vecenv, "base": base, "flagship": flagship, "value-first": value_first, "kl": kl,
        "atari": atari, "hopper": hopper, "comb": comb, "cluster": cluster, "gpu": gpu,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = "sections; default: all (cluster where there is Ray, gpu where there is one)"
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), help=only)
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--seconds", type=float, default=10, help="how long each training against others is timed")
    parser.add_argument("--sb3-python", type=os.path.abspath, help="an interpreter with stable-baselines3")
    parser.add_argument("--cleanrl", help="CleanRL's ppo_continuous_action.py; others are beside it")
    parser.add_argument("--cleanrl-python", type=os.path.abspath, default=sys.executable, help="one that can run it")
    parser.add_argument("--run-sb3", help=argparse.SUPPRESS)
    parser.add_argument("--sb3-network", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_sb3:
        return run_sb3(args.run_sb3, args.sb3_network)
    machine(args)
    for name in args.only:
        try:
            sections[name](args)
        except PeerError as error:
            print(f"## {name}\n\n{error}\n", flush=True)


if __name__ == "__main__":
    main()
