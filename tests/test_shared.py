"""What is written twice in the repository says the same twice; and scripts keep their shape."""

import ast
import io
import re
import sys
import textwrap
import tokenize
import tomllib

import pytest
from helpers import ROOT

SCRIPTS = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}
MAY_DIFFER = {"Args", "main", "check", "QNetwork", "ActorCritic"}  # each script has its own
EXCEPTIONS = {  # one speaks for several processes; MuJoCo is not Atari; tokens have no environments
    ("fail", "pqn_abs_xl.py"),
    ("make_envs", "ppo_abs_continuous.py"),
    ("run_folder", "p3o_tokens.py"),
    ("load_checkpoint", "p3o_tokens.py"),
    ("Run", "p3o_tokens.py"),
}


def definitions(source):
    """The source text of each function, class and constant at the top level, by its name."""
    lines = source.splitlines()
    texts = {}
    for node in ast.parse(source).body:
        names = []
        first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        for name in names:
            texts[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return texts


def drifted(scripts):
    """What two scripts both define, and not in the same words: (name, script, other script)."""
    originals = {}
    drift = []
    for script, source in scripts.items():
        for name, text in definitions(source).items():
            if name in MAY_DIFFER or (name, script) in EXCEPTIONS:
                continue
            first_script, first_text = originals.setdefault(name, (script, text))
            if text != first_text:
                drift.append((name, first_script, script))
    return drift


def test_scripts_share_word_for_word():
    """Guards readers of two scripts: what has one name is one thing."""
    assert drifted(SCRIPTS) == []


def test_tokens_handle_signals_and_ends_as_the_others_do():
    """Guards p3o_tokens.py's Run, which has no episodes: the rest of it is the others' text."""
    runs = [definitions(SCRIPTS[name])["Run"] for name in ("pqn_abs.py", "p3o_tokens.py")]
    methods = [definitions(textwrap.dedent(run.partition("\n\n")[2])) for run in runs]
    for name in ("interrupt", "close"):
        assert methods[0][name] == methods[1][name]


def test_drift_is_seen():
    """Guards the check itself, down to a comment and a decorator."""
    changes = [
        ("def fail(message, status=2):", "def fail(message, status=1):"),
        ("# as NaN is not, either", "# nor NaN"),
        ("@torch.no_grad()\ndef behavioral", "def behavioral"),
        ("SCRIPT = Path(__file__).name", "SCRIPT = __file__"),
    ]
    source = SCRIPTS["pqn_abs.py"]
    seen = []
    for old, new in changes:
        assert source.count(old) == 1, old
        seen += drifted({"one.py": source, "other.py": source.replace(old, new)})
    expected = ["fail", "behavioral_divergence", "SCRIPT"]  # check, with the NaN, may differ
    assert [name for name, *_ in seen] == expected


# --- Shape: a tutorial is read line by line ---

MOST_LINES = {"pqn_abs.py": 596, "pqn_abs_xl.py": 738, "gns_baseline.py": 680}  # others: 657
LIMITS = {
    "longest line": 100,
    "tokens a code line": 9.5,
    "comprehensions and conditionals for 100 code lines": 6,
    "lines of main": 150,
    "lines of main before its loop": 60,
    "functions inside main": 0,
}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DENSE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)


def shape(source):
    """The figures that LIMITS bounds."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    docstrings = set()
    for node in nodes:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            tokens.append(token)
    code_lines = len({token.start[0] for token in tokens})
    (main,) = (node for node in tree.body if getattr(node, "name", None) == "main")
    loops = [node for node in main.body if isinstance(node, ast.While | ast.For)]
    inner = [node for node in ast.walk(main) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    figures = [
        max(map(len, source.splitlines())),
        round(len(tokens) / code_lines, 1),
        round(100 * sum(isinstance(node, DENSE) for node in nodes) / code_lines, 1),
        main.end_lineno - main.lineno + 1,
        loops[0].lineno - main.lineno,
        len(inner) - 1,  # main itself
    ]
    return dict(zip(LIMITS, figures, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_shape(script):
    """Guards the reader: short files, short lines, one thing a line, a main that fits the mind."""
    over = {name: most for name, most in shape(SCRIPTS[script]).items() if most > LIMITS[name]}
    assert over == {}
    assert len(SCRIPTS[script].splitlines()) <= MOST_LINES.get(script, 657)


# --- Requirements, README ---


def requirements(path):
    lines = (ROOT / path).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_requires_what_it_imports(script):
    """Guards `uv run`: PEP 723's block names each package, as requirements.txt does."""
    block = re.search(r"# /// script\n((?:#.*\n)*?)# ///", SCRIPTS[script])
    metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    own = [re.sub(r"\[.*\]", "", line) for line in metadata["dependencies"]]  # without extras
    assert set(own) <= set(requirements("requirements.txt"))
    packages = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in own}
    imported = set(re.findall(r"(?m)^(?:import|from) (\w+)", SCRIPTS[script]))
    assert packages == imported - sys.stdlib_module_names
    assert metadata["requires-python"] == ">=3.11"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def options_of(path):
    """The names of the options that a file defines: fields of its Args, or argparse's."""
    source = path.read_text()
    names = set(re.findall(r'"--([a-z-]+)"', source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    name = field.target.id.replace("_", "-")
                    names |= {name, f"no-{name}"}
    if "import pqn_abs" in source:
        names |= options_of(ROOT / "pqn_abs.py")
    return names


def commands():
    found = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            for command in re.findall(r"(?:python|uv run) ([\w/]+\.py[^`|&]*)", line):
                found.append((page.name, command))
    return found


@pytest.mark.parametrize("page, command", commands())
def test_commands_in_the_pages_exist(page, command):
    """Guards whoever copies a command: the file is there and knows the options."""
    command = re.sub(r'"[^"]*"', "", command)  # suite.py's arms hold options of another script
    file, *words = command.split()
    known = options_of(ROOT / file)
    for word in words:
        if word.startswith("--"):
            assert word.removeprefix("--").partition("=")[0] in known, word
