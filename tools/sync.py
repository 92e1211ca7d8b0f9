"""Keep what the scripts share the same text: copy it from the script that owns it into the others.

    python tools/sync.py            # write the owners' text into the other scripts
    python tools/sync.py --check    # write nothing; name what has drifted, and exit with status 1

A function, class or constant that two scripts define under one name is shared. Its owner is the
first script of SCRIPTS that defines it: edit it there.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [  # the order decides who owns a text
    "pqn_abs.py",
    "pqn_abs_xl.py",
    "gns_baseline.py",
    "ppo_abs.py",
    "ppo_abs_continuous.py",
    "p3o_tokens.py",
]
OWN = {"Args", "main", "check_args"}  # each script has its own
EXCEPTIONS = {  # definitions that differ from those of the same name in other scripts
    ("QNetwork", "pqn_abs_xl.py"),
    *((name, "ppo_abs_continuous.py") for name in "ActorCritic make_envs check_policy".split()),
    ("launch", "p3o_tokens.py"),  # it has no environments, whose errors launch catches
}


def definitions(source: str, script: str = "") -> dict[str, tuple[int, int]]:
    """First and last line, counted from 0 and excluded, of each top-level definition."""
    places = {}
    for node in ast.parse(source, script).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            places[node.name] = first - 1, node.end_lineno
        elif isinstance(node, ast.Assign):
            places[ast.unparse(node.targets[0])] = node.lineno - 1, node.end_lineno
    return places


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    originals = {}
    drifted = False
    for script in SCRIPTS:
        source = (ROOT / script).read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for name, (start, end) in reversed(definitions(source, script).items()):  # bottom up
            if name in OWN or (name, script) in EXCEPTIONS:
                continue
            own = "".join(lines[start:end])
            owner, text = originals.setdefault(name, (script, own))
            if own != text:
                lines[start:end] = [text]
                drifted = True
                print(f"{script}: {name} is not as in {owner}{'' if words else ': overwritten'}")
        if not words:
            (ROOT / script).write_text("".join(lines), encoding="utf-8", newline="\n")
    return int(drifted and bool(words))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
