"""What two scripts share is the same text: the plumbing whole, and every class and function of one name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = "ppo_mlp_gaussian.py"
SCRIPTS = sorted(path.name for path in ROOT.glob("ppo_*.py"))
VARIANTS = [name for name in SCRIPTS if name != BASE]
PLUMBING = "# Plumbing: the same text in every script\n"
BY_DESIGN = {"Args", "Agent", "make_env", "minibatch_gradient", "update", "evaluate", "train"}
# Other differences between a script and the base, each with its reason.
DIFFERENT = {
    ("ppo_interleaved_gru_beta.py", "mlp"): "encoders and decoder have other depths than the base's networks",
}
OTHER_DOCSTRINGS = {
    # They have effect, or another one, with a flag; an epoch is of one phase.
    "ppo_value_first.py": {"cuda", "clip_vloss", "max_grad_norm", "update_epochs"},
    # --preset post has its own scaler and learning rates, and 0 stands for what the base can't do.
    "ppo_kl_adaptive.py": {"cuda", "learning_rate", "max_grad_norm", "norm_obs", "num_steps", "vf_coef"},
    "ppo_lstm_atari.py": {"cuda", "eval_episodes"},  # a greedy policy is no use in a game: actions are sampled there
}
# Most lines outside the plumbing that a variant may add to the base.
MOST_ADDED = {
    "ppo_interleaved_gru_beta.py": 355,
    "ppo_value_first.py": 200,
    "ppo_kl_adaptive.py": 390,
    "ppo_lstm_atari.py": 330,
    "ppo_comb_dist.py": 120,
}


def halves(name):
    text = (ROOT / name).read_text()
    assert text.count(PLUMBING) == 1, f"{name}: the plumbing begins once"
    algorithm, plumbing = text.split(PLUMBING)
    return algorithm, plumbing


def blocks(text):
    """{name: source with decorators and the comment-free lines in between} of the top-level definitions."""
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_plumbing_is_the_same_text(name):
    assert halves(name)[1] == halves(BASE)[1]


@pytest.mark.parametrize("name", VARIANTS)
def test_imports_are_the_same_text(name):
    def imports(script):
        return [ast.unparse(x) for x in ast.parse(halves(script)[0]).body if isinstance(x, ast.Import | ast.ImportFrom)]

    assert imports(name) == imports(BASE)


@pytest.mark.parametrize("name", VARIANTS)
def test_definitions_of_one_name_are_the_same_text(name):
    base, variant = blocks(halves(BASE)[0]), blocks(halves(name)[0])
    differing = {block for block in base.keys() & variant.keys() if base[block] != variant[block]}
    allowed = {block for script, block in DIFFERENT if script == name}
    assert differing - BY_DESIGN == allowed


@pytest.mark.parametrize("name", VARIANTS)
def test_common_args_are_the_same_text(name):
    """Fields of one name have one docstring and type, or a reason; only defaults differ."""

    def documented(script):
        body = next(node for node in ast.parse(halves(script)[0]).body if getattr(node, "name", "") == "Args").body
        pairs = zip(body[::2], body[1::2])
        return {field.target.id: (ast.unparse(field.annotation), text.value.value) for field, text in pairs}

    base, variant = documented(BASE), documented(name)
    assert list(base)[:14] == list(variant)[:14]  # the common part comes first, in one order
    differing = {field for field in base.keys() & variant.keys() if base[field] != variant[field]}
    assert differing <= OTHER_DOCSTRINGS.get(name, {"cuda"})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_adds_few_lines(name):
    import difflib

    diff = difflib.unified_diff(halves(BASE)[0].splitlines(), halves(name)[0].splitlines(), n=0, lineterm="")
    added = [line for line in diff if line.startswith("+") and not line.startswith("+++")]
    assert len(added) <= MOST_ADDED[name], len(added)


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
    assert all("==" in pin for pin in pinned)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_says_what_it_does(name):
    body = next(node for node in ast.parse(halves(name)[0]).body if getattr(node, "name", "") == "Args").body
    for field, text in zip(body[::2], body[1::2]):
        assert isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and len(text.value.value) > 8


def test_every_difference_listed_is_one():
    for script, block in DIFFERENT:
        assert blocks(halves(BASE)[0])[block] != blocks(halves(script)[0])[block]
