"""What is written twice in the repository says the same twice; and scripts keep their shape."""

import ast
import io
import re
import shutil
import sys
import tokenize
import tomllib

import pytest
from helpers import ROOT, contents, end_of, start

from tools import sync

SCRIPTS = {path.name: path.read_text() for path in sorted(ROOT.glob("*.py"))}


# --- tools/sync.py: what has one name is one thing ---


def test_scripts_share_word_for_word(capsys):
    """Guards readers of two scripts; sync.py without --check makes it so."""
    assert set(sync.SCRIPTS) == set(SCRIPTS)
    assert sync.main(["--check"]) == 0, capsys.readouterr().out


def test_exceptions_are_needed():
    """Guards against an exception that outlives its reason: text that is equal is shared."""
    for name, script in sync.EXCEPTIONS:
        others = [other for other in sync.SCRIPTS if name in sync.definitions(SCRIPTS[other])]
        assert script in others and script != others[0]
        owner, own = (
            SCRIPTS[file].splitlines()[slice(*sync.definitions(SCRIPTS[file])[name])]
            for file in (others[0], script)
        )
        assert owner != own, f"{name} of {script}"


CHANGES = {
    "fail": lambda text: text.replace("status=2", "status=1"),
    "behavioral_divergence": lambda text: text.removeprefix("@torch.no_grad()\n"),
    "SCRIPT": lambda text: text.replace("argv[0]", "argv[1]"),
    "Run": lambda text: f"{text.rstrip()}  # a comment\n",
    "layer_init": lambda text: text.replace("Orthogonal", "orthogonal"),
}


def drifted(source, name):
    """The source with another text of this definition."""
    lines = source.splitlines(keepends=True)
    start, end = sync.definitions(source)[name]
    text = "".join(lines[start:end])
    assert CHANGES[name](text) != text
    return "".join([*lines[:start], CHANGES[name](text), *lines[end:]])


@pytest.mark.parametrize("name", CHANGES)
def test_drift_is_seen_and_undone(name):
    """Guards the check itself, down to a comment and a decorator; main is each script's own."""
    source = SCRIPTS["pqn_abs.py"]
    own_main = source.replace("def main(args,", "def main(args, own=1,")
    assert own_main != source
    scripts = {"pqn_abs.py": source, "other.py": drifted(own_main, name)}
    synced, lines = sync.synchronise(scripts)
    assert synced == {"pqn_abs.py": source, "other.py": own_main}
    assert lines == [f"other.py: {name} is not as in pqn_abs.py"]


def test_sync_from_the_command_line(tmp_path):
    """Guards --check, which writes nothing, and the status of each; the owner's text is kept."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "sync.py", tmp_path / "tools")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    tool = tmp_path / "tools" / "sync.py"
    end_of(start(tool))
    whole = contents(tmp_path)
    script = tmp_path / "p3o_tokens.py"
    script.write_text(drifted(script.read_text(), "fail"))
    changed = contents(tmp_path)
    output, _ = end_of(start(tool, "--check"), status=1)
    assert "p3o_tokens.py: fail is not as in pqn_abs.py\n" in output
    assert contents(tmp_path) == changed != whole
    end_of(start(tool))
    assert contents(tmp_path) == whole
    output, _ = end_of(start(tool, "--check"))
    assert output == ""
    end_of(start(tool, "--chekc"), status=2)
    assert contents(tmp_path) == whole


# --- Shape: a tutorial is read line by line ---

LINES_BELOW = 268  # the banner after which nothing is about the algorithm
LINES_BELOW_XL = 300  # pqn_abs_xl.py speaks for several processes
LIMITS = {
    "longest line": 100,
    "tokens a code line": 9.5,
    "comprehensions and conditionals for 100 code lines": 6,
    "lines of main": 140,
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
    loops = [node.lineno for node in ast.walk(main) if isinstance(node, ast.While)]
    inner = [node for node in ast.walk(main) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    figures = [
        max(map(len, source.splitlines())),
        round(len(tokens) / code_lines, 1),
        round(100 * sum(isinstance(node, DENSE) for node in nodes) / code_lines, 1),
        main.end_lineno - main.lineno + 1,
        min(loops) - main.lineno,
        len(inner) - 1,  # main itself
    ]
    return dict(zip(LIMITS, figures, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_shape(script):
    """Guards the reader: short lines, one thing a line, a main that fits the mind, no fat below."""
    limits = LIMITS | ({"lines of main": 143} if script == "pqn_abs_xl.py" else {})
    over = {name: most for name, most in shape(SCRIPTS[script]).items() if most > limits[name]}
    assert over == {}
    _, below = SCRIPTS[script].split("\n# --- From here on: ")
    most = LINES_BELOW_XL if script == "pqn_abs_xl.py" else LINES_BELOW
    assert len(below.splitlines()) <= most


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
    imported = set()
    for node in ast.walk(ast.parse(SCRIPTS[script])):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
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
