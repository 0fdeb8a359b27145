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
    ("ppo_interleaved_gru_beta.py", "SubprocVecEnv"): "as there, and it may be one of several, on other machines",
    ("ppo_interleaved_gru_beta.py", "worker"): "the same",
}
OTHER_DOCSTRINGS = {
    # They have effect, or another one, with a flag; an epoch is of one phase.
    "ppo_value_first.py": {"clip_vloss", "max_grad_norm", "update_epochs"},
    # --preset post has its own scaler and learning rates, and 0 stands for what the base can't do.
    "ppo_kl_adaptive.py": {"learning_rate", "max_grad_norm", "norm_obs", "num_steps", "vf_coef"},
    "ppo_lstm_atari.py": {"eval_episodes"},  # a greedy policy is no use in a game: actions are drawn there
}
LONGEST = {
    "ppo_mlp_gaussian.py": 846,
    "ppo_comb_dist.py": 850,
    "ppo_value_first.py": 913,
    "ppo_kl_adaptive.py": 1023,
    "ppo_lstm_atari.py": 1130,
    "ppo_interleaved_gru_beta.py": 1129,
}
LONGEST_PLUMBING = 417
LONGER_PLUMBING = {"ppo_lstm_atari.py": 422, "ppo_interleaved_gru_beta.py": 430}  # halves; and machines of a cluster


def halves(name):
    text = (ROOT / name).read_text()
    assert text.count(PLUMBING) == 1, f"{name}: the plumbing begins once"
    return text[: text.index(PLUMBING)], text[text.index(PLUMBING) :].split("# A cluster: ")[0]


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
    """But for the games, and for the machines of a cluster: what the flagship's class says of them in a line or two."""
    flagship, recurrent = ((ROOT / name).read_text() for name in ("ppo_interleaved_gru_beta.py", "ppo_lstm_atari.py"))

    def methods(text):
        (envs,) = (x for x in ast.parse(text).body if getattr(x, "name", "") == "SubprocVecEnv")
        return {x.name: ast.get_source_segment(text, x) for x in envs.body if isinstance(x, ast.FunctionDef)}

    ours, theirs = methods(flagship), methods(recurrent)
    assert ours.keys() - theirs.keys() == {"_start", "_answer"}
    assert {name for name in theirs if ours[name] != theirs[name]} == {"__init__", "receive"}
    ours, theirs = (blocks(text)["worker"].splitlines() for text in (flagship, recurrent))
    assert [x for x in ours if x not in theirs and "rows, generators" not in x and "if begin:" not in x] == []
    assert [x for x in theirs if x not in ours and "games" not in x and "rows, generators" not in x] == []


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
    plumbing = len(halves(name)[1].partition('if __name__ == "__main__"')[0].rstrip().splitlines())
    assert len((ROOT / name).read_text().splitlines()) <= LONGEST[name]
    assert plumbing <= LONGER_PLUMBING.get(name, LONGEST_PLUMBING)


CLIPPED_POLICY = """clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
-torch.min(ratio * advantages, clipped_ratio * advantages).mean()"""
CLIPPED_VALUE = """errors = (new_values - returns).square()
clipped_values = values + (new_values - values).clamp(-args.clip_coef, args.clip_coef)
errors = torch.max(errors, (clipped_values - returns).square())
0.5 * errors.mean()"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_clipped_losses_are_the_same_text(name):
    """They stand in functions that differ; tests/test_math.py holds the base's to its table."""
    for flag, loss in {"clip_coef": CLIPPED_POLICY, "clip_vloss": CLIPPED_VALUE}.items():
        if flag in fields(name):
            assert [line for line in loss.splitlines() if line not in halves(name)[0]] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_of_one_name_are_the_same_text_but_for_their_defaults(name):
    base, variant = fields(BASE), fields(name)
    common = [flag for flag in base if flag in variant]
    assert common == [flag for flag in variant if flag in base]  # in one order
    differing = {flag for flag in common if base[flag] != variant[flag]}
    assert differing - {"cuda"} <= OTHER_DOCSTRINGS.get(name, set())


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
    assert pinned and set(pinned) <= set(requirements)
    assert all("==" in pin or pin == "mujoco>=3.1.6,<4" for pin in pinned)
