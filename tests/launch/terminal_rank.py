"""``terminal_rank.py FOLDER``: a rank without torch that shows what a run shows, and then fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from pipeline.cluster.agent.agent import own_rank

    own_rank(sys.argv)

from pipeline.cluster.agent.rank_link import connect, split_inherited
from pipeline.training.console import make_console, show_job
from pipeline.training.metrics import StepMetrics

inherited, arguments = split_inherited(sys.argv[1:])
link = connect(inherited)
link.folder(arguments[-1])
console = make_console(0, total_steps=10_000, log_interval=5)
show_job(console, 0)
link.progress("preparing data", 0)
time.sleep(3.4)
console.message("tokenizing 473 files")
time.sleep(1.2)
link.progress("building", 0)
time.sleep(1.6)  # agents report once a second
console.start(["training: 448 documents, 8,403,622 tokens, 131,306 samples per epoch, 37 tokens left out"])
for step in range(1, 12):
    link.progress("training", step - 1)
    console.step(StepMetrics(step, 5.25, 1.25, 3e-4, 100 * step, 0.05, 12345.6, 12.34, 0.41, 0.01, False))
    time.sleep(0.05)
    if step == 7:
        os.write(2, b"a line of a library's native code\n")
console.message("to resume: ./launch.sh --num_gpus 2 --config runs/tiny/run.json --output_dir runs/tiny")
try:
    raise OSError("no space left on a device that has a long name, and more of it than fits a line of 80")
except OSError as error:
    link.failed(error, 11, "Traceback\n" * 40)
os._exit(1)
