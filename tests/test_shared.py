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


def drifted(source, name):
    """The source with a comment more in this definition."""
    lines = source.splitlines(keepends=True)
    lines.insert(sync.definitions(source)[name][1] - 1, "    # a comment\n")
    return "".join(lines)


def test_sync_from_the_command_line(tmp_path):
    """Guards --check, which writes nothing; the owner's text is kept, and main is each script's."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "sync.py", tmp_path / "tools")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    tool = tmp_path / "tools" / "sync.py"
    end_of(start(tool))
    whole = contents(tmp_path)
    script = tmp_path / "p3o_tokens.py"
    for name in ("main", "seed_all", "Run"):
        script.write_text(drifted(script.read_text(), name))
        changed = contents(tmp_path)
        output, _ = end_of(start(tool, "--check"), status=int(name != "main"))
        found = f"p3o_tokens.py: {name} is not as in pqn_abs.py\n"
        assert output == ("" if name == "main" else found)
        assert contents(tmp_path) == changed != whole
        end_of(start(tool))
        whole = contents(tmp_path)
        assert (whole == changed) == (name == "main")
    end_of(start(tool, "--chekc"), status=2)


# --- Shape: a tutorial is read line by line ---

LIMITS = {
    "longest line": 100,
    "tokens a code line": 9.8,
    "lines of main": 156,
    "functions inside main": 0,
    "lines below the banner": 264,  # after which nothing is about the algorithm
}
LAYOUT = [tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT]


def shape(source):
    """The figures that LIMITS bounds."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            tokens.append(token)
    (main,) = (node for node in tree.body if getattr(node, "name", None) == "main")
    inner = [node for node in ast.walk(main) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    _, below = source.split("\n# --- From here on: ")
    figures = [
        max(map(len, source.splitlines())),
        round(len(tokens) / len({token.start[0] for token in tokens}), 1),
        main.end_lineno - main.lineno + 1,
        len(inner) - 1,  # main itself
        len(below.splitlines()),
    ]
    return dict(zip(LIMITS, figures, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_shape(script):
    """Guards the reader: short lines, one thing a line, a main that fits the mind, no fat below."""
    figures = shape(SCRIPTS[script])
    assert {name: most for name, most in figures.items() if most > LIMITS[name]} == {}


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
