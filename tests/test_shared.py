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


def test_scripts_share_word_for_word(capsys):
    """Guards readers of two scripts; sync.py without --check makes it so."""
    assert set(sync.SCRIPTS) == set(SCRIPTS)
    assert sync.main(["--check"]) == 0, capsys.readouterr().out


def test_sync_from_the_command_line(tmp_path):
    """Guards --check, which writes nothing; without it, the owner's text is kept."""
    (tmp_path / "tools").mkdir()
    tool = shutil.copy(ROOT / "tools" / "sync.py", tmp_path / "tools")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    whole = contents(tmp_path)
    script = tmp_path / "p3o_tokens.py"
    script.write_text(
        script.read_text().replace("    def interrupt(", "    # a comment\n    def interrupt(")
    )
    changed = contents(tmp_path)
    output, _ = end_of(start(tool, "--check"), status=1)
    assert output == "p3o_tokens.py: Run is not as in pqn_abs.py\n"
    assert contents(tmp_path) == changed != whole
    end_of(start(tool))
    assert contents(tmp_path) == whole
    end_of(start(tool, "--chekc"), status=2)


# --- Shape: a tutorial is read line by line ---

LIMITS = {
    "tokens a code line": 9.8,
    "lines of main": 155,
    "functions inside main": 0,
    "lines below the banner": 225,  # after which nothing is about the algorithm
}
LINES = {"pqn_abs.py": 565, "pqn_abs_xl.py": 640, "gns_baseline.py": 595}
LINES |= {"ppo_abs.py": 580, "ppo_abs_continuous.py": 575, "p3o_tokens.py": 535}
LAYOUT = [tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT]


def shape(source):
    """The figures that LIMITS bounds."""
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and not token.string.startswith('"""'):
            tokens.append(token)
    (main,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "main")
    inner = [node for node in ast.walk(main) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    _, below = source.split("\n# --- From here on: ")
    figures = [
        round(len(tokens) / len({token.start[0] for token in tokens}), 1),
        main.end_lineno - main.lineno + 1,
        len(inner) - 1,  # main itself
        len(below.splitlines()),
    ]
    return dict(zip(LIMITS, figures, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_shape(script):
    """Guards the reader: one thing a line, a main that fits the mind, no fat below."""
    figures = shape(SCRIPTS[script])
    assert len(SCRIPTS[script].splitlines()) <= LINES[script]
    assert {name: most for name, most in figures.items() if most > LIMITS[name]} == {}


# --- Imports, requirements, README ---

IMPORT = """
import sys, torch
sys.argv = []
torch.cuda._lazy_init = None  # to call it is an error
import {scripts}
assert sys.argv == []
"""


def test_importing_a_script_does_nothing(tmp_path):
    """Guards programs that import one: no command line, no CUDA context, no word, no file."""
    code = IMPORT.format(scripts=", ".join(SCRIPTS).replace(".py", ""))
    assert end_of(start("-c", code, cwd=tmp_path)) == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_requires_what_it_imports(script):
    """Guards `uv run`: PEP 723's block names each package, as requirements.txt does."""
    block = re.search(r"# /// script\n((?:#.*\n)*?)# ///", SCRIPTS[script])
    metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    own = [re.sub(r"\[.*\]", "", line) for line in metadata["dependencies"]]  # without extras
    assert set(own) <= set((ROOT / "requirements.txt").read_text().splitlines())
    packages = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in own}
    statement = r"(?m)^ *(?:import|from) (\w+)[\w.]*(?: as \w+| import .*)?$"
    imported = set(re.findall(statement, SCRIPTS[script]))
    assert packages == imported - sys.stdlib_module_names
    assert metadata["requires-python"] == ">=3.11"


def options_of(path):
    """The names of the options that a file defines: fields of its Args, or argparse's."""
    source = path.read_text()
    names = set(re.findall(r'"--([a-z-]+)"', source))
    for field in re.findall(r"^    (\w+): ", source, flags=re.MULTILINE):
        names |= {field.replace("_", "-"), f"no-{field.replace('_', '-')}"}
    if "import pqn_abs" in source:
        names |= options_of(ROOT / "pqn_abs.py")
    return names


def commands():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for command in re.findall(r"(?:python|uv run) ([\w/]+\.py[^`|&\n]*)", page.read_text()):
            yield page.name, command


@pytest.mark.parametrize("page, command", list(commands()))
def test_commands_in_the_pages_exist(page, command):
    """Guards whoever copies a command: the file is there and knows the options."""
    command = re.sub(r'"[^"]*"', "", command)  # suite.py's arms hold options of another script
    file, *words = command.split()
    known = options_of(ROOT / file)
    for word in words:
        if word.startswith("--"):
            assert word.removeprefix("--").partition("=")[0] in known, word
