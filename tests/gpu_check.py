"""What only a GPU can tell about the scripts, in one command that needs no network; a few minutes with one.

    python tests/gpu_check.py                     then the speeds: python tests/bench_speed.py --only gpu

Each script trains on tests/misbehaving.py's healthy environment. Without a GPU it is only checked that everything in
the updates stands on one device: tensors of the device "meta", which have no data, go through them.
The exit code is the number of checks that failed.
"""

import copy
import math
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import conftest
import torch
from conftest import SCRIPTS, load, resume_args, small_args

MODULES = {module: name for name, module in SCRIPTS.items()}
# An update may wait for the GPU where it needs a number: sequences' lengths, a KL that stops it.
WAITS = {conftest.recurrent: "the sequences' number and length", conftest.adaptive: "stops at a KL that is too large"}
UPDATES = ["update", "fit_value", "compute_gae", "discounted_returns"]


@contextmanager
def replaced(module, **functions):
    saved = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in saved.items():
            setattr(module, name, function)


def train(module, directory, iterations=2, **changes):
    return module.train(small_args(module, directory, iterations, **{"cuda": True} | changes))


def recorded(module, directory, **changes):
    """[(name, inputs, inputs after the call, outcome)] of a training's calls of UPDATES, on the CPU."""
    calls = []

    def spy(name, function):
        def call(*inputs):
            before = copy.deepcopy(inputs)  # optimizers' parameters stay those of the networks
            seed = torch.get_rng_state()
            outcome = function(*inputs)
            calls.append((name, before, copy.deepcopy(inputs), copy.deepcopy(outcome), seed))
            return outcome

        return call

    functions = {name: spy(name, getattr(module, name)) for name in UPDATES if hasattr(module, name)}
    with replaced(module, **functions):
        train(module, directory, cuda=False, **changes)
    return calls


def moved(x, move, parameters):
    """Tensors, networks, optimizers and what holds them, with `move` done to each tensor."""
    if isinstance(x, torch.optim.Optimizer):
        for group in x.param_groups:
            group["params"] = [parameters[id(p)] for p in group["params"]]
        states = [(parameters[id(p)], moved(state, move, parameters)) for p, state in x.state.items()]
        x.state.clear()
        x.state.update(states)
        return x
    if isinstance(x, torch.nn.Module):
        for module in x.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = parameters[id(p)] = torch.nn.Parameter(move(p.detach()), p.requires_grad)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else move(buffer)
        return x
    if isinstance(x, torch.Tensor):
        return move(x)
    if isinstance(x, dict):
        return {key: moved(value, move, parameters) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(moved(value, move, parameters) for value in x)
    return x


def tensors(x):
    """All tensors in it, in one order."""
    if isinstance(x, torch.nn.Module):
        return list(x.state_dict().values())
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict | list | tuple):
        return [y for value in (x.values() if isinstance(x, dict) else x) for y in tensors(value)]
    return []


def check_placement(module, directory):
    """Every tensor of an update is on the networks' device. Left out: the recurrent one, whose flow depends on data."""
    changes = {"kl_stop": None} if module is conftest.adaptive else {}
    for name, inputs, *_ in recorded(module, directory, **changes):
        if module is conftest.recurrent and name == "update":
            continue
        inputs = moved(inputs, lambda x: x.to("meta"), {})
        for optimizer in inputs:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step = lambda: None  # it needs data
        outcome = getattr(module, name)(*inputs)
        assert all(x.device.type == "meta" for x in tensors(outcome)), name


def check_same_update(module, directory):
    """CPU and GPU make the same of one batch, from the same parameters with the same minibatches, to 1e-4."""
    for name, before, after, expected, seed in recorded(module, directory):
        inputs = moved(before, lambda x: x.cuda(), {})
        torch.set_rng_state(seed)
        with replaced(torch, randperm=lambda n, device=None, function=torch.randperm: function(n).to(device)):
            outcome = getattr(module, name)(*inputs)
        for x, y in zip(tensors((inputs, outcome)), tensors((after, expected)), strict=True):
            assert x.device.type == "cuda"
            torch.testing.assert_close(x.cpu(), y, atol=1e-4, rtol=1e-4)


def check_ratios(module, directory):
    """The first minibatch of a rollout has ratios of 1, to 1e-4."""
    ratios, gradient = [], module.minibatch_gradient

    def spy(*inputs):
        log_ratio, losses = gradient(*inputs)
        ratios.append(log_ratio.exp())
        return log_ratio, losses

    with replaced(module, minibatch_gradient=spy):
        train(module, directory, 1)
    first = ratios[0]
    assert first.device.type == "cuda" and math.isclose((first - 1).abs().max().item(), 0, abs_tol=1e-4)


def check_no_waiting(module, directory):
    """Nothing in an update's minibatch loop waits for the GPU."""
    if module in WAITS:
        return f"waits: {WAITS[module]}"
    update = module.update

    def strict(*inputs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return update(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with replaced(module, update=strict):
        train(module, directory)


def check_compiled(module, directory):
    """Compiled training ends where eager training does, to 1e-3 (Adam's steps are of 3e-4)."""
    with torch._inductor.config.patch(fallback_random=True):
        for compiled in (False, True):
            train(module, directory / str(compiled), compile=compiled)
    eager, compiled = (load(directory / str(x))["model"] for x in (False, True))
    for name, value in eager.items():
        torch.testing.assert_close({name: compiled[name]}, {name: value}, atol=1e-3, rtol=1e-3)  # names what differs


def check_checkpoint(module, directory):
    """A checkpoint goes from GPU to CPU and back; what is saved after no step is what was loaded."""
    train(module, directory, 1)
    for iterations, cuda in (2, False), (3, True):
        before = load(directory)["model"]
        loaded, begin = {}, module.Run.begin

        def spy(run, envs, begin=begin, loaded=loaded, **parts):
            begin(run, envs, **parts)
            loaded.update({name: value.cpu().clone() for name, value in parts["model"].state_dict().items()})

        with replaced(module.Run, begin=spy):
            module.train(resume_args(module, directory, total_timesteps=iterations * conftest.BATCH, cuda=cuda))
        assert all(torch.equal(loaded[name], value) for name, value in before.items())


def main():
    gpu = torch.cuda.is_available()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if gpu else 'no GPU'}\n")
    checks = [check_same_update, check_ratios, check_no_waiting, check_checkpoint, check_compiled]
    failed = 0
    for check in checks if gpu else [check_placement]:
        for module, name in MODULES.items():
            with tempfile.TemporaryDirectory() as directory:
                try:
                    verdict = check(module, Path(directory) / "run") or "ok"
                except (Exception, SystemExit) as error:
                    traceback.print_exc()
                    failed, verdict = failed + 1, f"FAILED: {type(error).__name__}"
            print(f"{check.__name__.removeprefix('check_')}, {name}: {verdict}", flush=True)
    if not gpu:
        left_out = ", ".join(check.__name__.removeprefix("check_") for check in checks)
        print(f"\nleft out, as there is no GPU: {left_out}; of placement the updates of", MODULES[conftest.recurrent])
    sys.exit(failed)


if __name__ == "__main__":
    main()
