"""What two scripts share is the same text: every top-level class and function of one name. And a script stays short."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = "ppo_mlp_gaussian.py"
SCRIPTS = sorted(path.name for path in ROOT.glob("ppo_*.py"))
PLUMBING = "# Plumbing: "
# Differences by design. Each script has its own of these,
OWN = {"Args", "Agent", "make_env", "minibatch_gradient", "train"}
# and of the rest for a reason:
DIFFERENT = {
    ("ppo_interleaved_gru_beta.py", "mlp"): "encoders and decoder have other depths than the base's networks",
    ("ppo_interleaved_gru_beta.py", "evaluate"): "a memory of each episode's last steps",
    ("ppo_kl_adaptive.py", "update"): "stops at a minibatch whose KL is too large",
    ("ppo_lstm_atari.py", "evaluate"): "a recurrent state; Atari's actions are drawn",
}
IN_THE_PLUMBING = {
    ("ppo_lstm_atari.py", "SubprocVecEnv"): "halves of the environments take turns",
    ("ppo_lstm_atari.py", "worker"): "the same, and games of several lives are reported whole",
    ("ppo_interleaved_gru_beta.py", "SubprocVecEnv"): "halves, and it may be one of several, on other machines",
    ("ppo_interleaved_gru_beta.py", "worker"): "the same",
}
OTHER_DOCSTRINGS = {
    # They have effect, or another one, with a flag; an epoch is of one phase.
    "ppo_value_first.py": {"clip_vloss", "max_grad_norm", "update_epochs"},
    # --preset post has its own scaler and learning rates, and 0 stands for what the base can't do.
    "ppo_kl_adaptive.py": {"learning_rate", "norm_obs", "num_steps", "vf_coef"},
    "ppo_lstm_atari.py": {"eval_episodes"},  # a greedy policy is no use in a game: actions are drawn there
}
LONGEST = {
    "ppo_mlp_gaussian.py": 840,
    "ppo_comb_dist.py": 843,
    "ppo_value_first.py": 907,
    "ppo_kl_adaptive.py": 1022,
    "ppo_lstm_atari.py": 1113,
    "ppo_interleaved_gru_beta.py": 1129,
}
LONGEST_PLUMBING = 417  # to the file's end


def halves(name):
    text = (ROOT / name).read_text()
    assert text.count(PLUMBING) == 1, f"{name}: the plumbing begins once"
    return text[: text.index(PLUMBING)], text[text.index(PLUMBING) :]


def blocks(text):
    """{name: source} of the top-level classes and functions, with their decorators."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def fields(name):
    """{flag: (annotation, the comment behind it)} of Args, in order."""
    algorithm = halves(name)[0]
    body = next(node for node in ast.parse(algorithm).body if getattr(node, "name", "") == "Args").body
    lines, found = algorithm.splitlines(), {}
    for field in body:
        found[field.target.id] = ast.unparse(field.annotation), lines[field.end_lineno - 1][field.end_col_offset :]
    return found


def test_blocks_of_one_name_are_the_same_text():
    versions = defaultdict(dict)
    for script in SCRIPTS:
        for name, source in blocks((ROOT / script).read_text()).items():
            if name not in OWN and (script, name) not in DIFFERENT | IN_THE_PLUMBING:
                versions[name].setdefault(source, []).append(script)
    assert {name: list(found.values()) for name, found in versions.items() if len(found) > 1} == {}


def test_where_halves_take_turns_environments_are_the_same_text():
    """But for the games; and the flagship's environments may be one machine's, from the environment `first` on."""
    base, flagship, recurrent = (
        blocks((ROOT / name).read_text()) for name in (BASE, "ppo_interleaved_gru_beta.py", "ppo_lstm_atari.py")
    )
    envs = flagship["SubprocVecEnv"].replace(", first=0", "").replace(", n_children_spawned=first", "")
    assert envs == recurrent["SubprocVecEnv"] != flagship["SubprocVecEnv"]
    half = 'command in (STEP, b"%d" % ((first + i) % 2))'
    assert flagship["worker"].replace(half, "command == STEP") == base["worker"] != flagship["worker"]
    rest = recurrent["worker"].replace(half, "command == STEP").splitlines()
    assert [x for x in rest if x not in base["worker"].splitlines() and "games" not in x] == []


def test_every_difference_listed_is_one():
    base = blocks((ROOT / BASE).read_text())
    for script, name in DIFFERENT | IN_THE_PLUMBING:
        assert blocks((ROOT / script).read_text())[name] != base[name], (script, name)
    assert len(IN_THE_PLUMBING) <= 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_plumbing_has_one_order_and_the_same_lines_between_its_blocks(name):
    def rest(script):
        text = halves(script)[1].split('if __name__ == "__main__":')[0]  # presets are read there
        for block_name, source in blocks(text).items():
            text = text.replace(source, block_name)
        return text

    assert rest(name) == rest(BASE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST[name]
    assert len(halves(name)[1].splitlines()) - 1 <= LONGEST_PLUMBING


TRAIN = """while run.global_step < run.budget:
return run.finish(*evaluate(run, agent, make, run.video_folder))"""
CLIPPED_POLICY = """clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
-torch.min(ratio * advantages, clipped_ratio * advantages).mean()"""
CLIPPED_VALUE = """errors = (new_values - returns).square()
clipped_values = values + (new_values - values).clamp(-args.clip_coef, args.clip_coef)
errors = torch.max(errors, (clipped_values - returns).square())
0.5 * errors.mean()"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_clipped_losses_are_the_same_text(name):
    """They stand in functions that differ; tests/test_math.py holds the base's to its table."""
    for flag, loss in {"seed": TRAIN, "clip_coef": CLIPPED_POLICY, "clip_vloss": CLIPPED_VALUE}.items():
        if flag in fields(name):
            assert [line for line in loss.splitlines() if line not in halves(name)[0]] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_of_one_name_are_the_same_text_but_for_their_defaults(name):
    base, variant = fields(BASE), fields(name)
    common = [flag for flag in base if flag in variant]
    assert common == [flag for flag in variant if flag in base]  # in one order
    differing = {flag for flag in common if base[flag] != variant[flag]}
    assert differing - {"cuda"} == OTHER_DOCSTRINGS.get(name, set())


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_says_what_it_does(name):
    assert all(text.startswith("  # ") and len(text) > 12 for _, text in fields(name).values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_imports_another(name):
    text = (ROOT / name).read_text()
    assert not [other for other in SCRIPTS if f"import {other[:-3]}" in text or f"from {other[:-3]}" in text]


@pytest.mark.parametrize("name", SCRIPTS)
def test_dependencies_are_those_of_requirements_txt(name):
    requirements = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    header = (ROOT / name).read_text().split("# ///")[1]
    pinned = [line.split('"')[1] for line in header.splitlines() if line.startswith('#     "')]
    games = [x for x in requirements if x.startswith(("ale-py", "opencv"))]
    assert pinned == [x for x in requirements if x and (x not in games or name == "ppo_lstm_atari.py")]
    assert all("==" in pin or pin == "mujoco>=3.1.6,<4" for pin in pinned)
