"""Minutes from a command's start until the mean of its last 100 games reaches a score.

python measure.py TARGET OUT.csv GAMES command...

GAMES is the file that the games appear in: for pqn_abs.py runs/<run>/episodes.csv, which it wrote
until commit 02a7483; for CleanRL OUT.log, which takes what the command prints, such as
"global_step=8192, episodic_return=2.0". OUT.csv gets a row every half minute and a last one when
the score is TARGET; then the command is stopped.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

GAME = re.compile(r"^(?:global_step=)?(\d+), ?(?:episodic_return=)?(-?[\d.]+)", re.MULTILINE)

target, out, games, command = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
start = time.time()
log = out.with_suffix(".log").open("w")
process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
rows = ["minutes,global_step,score"]
written = 0
score = None
while process.poll() is None and (score is None or score < target):
    time.sleep(1)
    found = GAME.findall(games.read_text()) if games.exists() else []
    if len(found) < 100:
        continue
    last = [float(game[1]) for game in found[-100:]]
    score = sum(last) / 100
    if time.time() - written >= 30 or score >= target:
        written = time.time()
        rows.append(f"{(written - start) / 60:.2f},{found[-1][0]},{score:.2f}")
        out.write_text("\n".join(rows) + "\n")
if process.poll() is None:
    process.terminate()
process.wait()
print(out.stem, rows[-1])
