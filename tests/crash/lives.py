"""A run that is killed again and again, and goes on each time, perhaps in another layout.

    python -m tests.crash.lives --kills 1000 --seed 1        the long version, by hand

Each life starts the same command in a layout drawn at random, and is killed at a random point in or around
a load, a conversion, a save or a removal of old checkpoints. What must hold is looked at after every life:

- what the run would resume from is complete, and no older than before the kill;
- the start after it resumes from there: it is neither refused nor begins anew;
- in the end, the joined metrics are those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.checkpoints.files import digest_of
from pipeline.checkpoints.manifest import Checkpoint
from tests.checkpoints.saved_runs import find_checkpoint
from tests.crash.kill_point import KillPoint, kill_at
from tests.end_to_end.jobs import PROJECT, Workshop, run_faulty_job
from tests.harness import JobResult, run_job, stop_server
from tests.harness.client import CPU_ENVIRONMENT

ENDLESS = 1_000_000
# Another layout adds in another order. What five layouts in turn differ by from one comes and goes from step
# to step: in 450 steps the loss was off by 7e-7 at most, the norm by 1.3e-5 (2e-5 after 1,000 kills).
# A momentum that is lost once puts the loss off by 1e-2 and the norm by 0.1 to 0.4.
COMPARED_STEPS = 300
TOLERANCE = {"loss": 1e-5, "grad_norm": 5e-5}
# How often the first rank touches the folder in a load; with the first save; with five of them.
EVENTS = (25, 70, 260)
LONGEST_DELAY = 0.03
LIMIT = 90.0
# A launch takes about this long from its start to its first save, and to its tenth.
LAUNCH_SECONDS = (4.0, 16.0)
# Agents end the ranks of a launch that is gone; more than they need.
ORPHAN_SECONDS = 60.0
KEEP_LAST, KEEP_EVERY = 2, 16
LAUNCH_EVERY = 20
LAUNCH = PROJECT / "pipeline" / "launch" / "launch.py"

# SGD, whose steps keep rounding differences small; the rate stays, so that a run has no end of its own.
SETTINGS: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02}},
}


@dataclass(frozen=True)
class Layout:
    """What a life is started with."""

    name: str
    ranks: int
    config: dict[str, Any]


LAYOUTS = (
    Layout("data 2, ZeRO 1", 2, {"zero_optimization": {"stage": 1}}),
    Layout("data 2, ZeRO 3", 2, {"zero_optimization": {"stage": 3}}),
    Layout("pipeline 2", 2, {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}),
    Layout("tensor 2", 2, {"tensor_parallel": {"autotp_size": 2}}),
    Layout("one rank", 1, {}),
)


@dataclass
class Report:
    """What was seen.

    Attributes:
        killed: Lives that ended by the kill, by what was going on.
        survived: Lives in which the point was never reached, so that they were stopped.
        conversions: Starts in another layout than the one that saved.
    """

    killed: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    conversions: int = 0
    step: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        what = "\n".join(f"  {count:5d}  {name}" for name, count in self.killed.most_common())
        total = sum(self.killed.values())
        return (
            f"{total} kills, {self.survived} lives not reached, {self.conversions} conversions, "
            f"{self.step} steps, {self.seconds:.0f} s; killed at\n{what}"
        )


class KilledRun:
    """One run and its lives.

    Args:
        folder: An empty folder for it.
        seed: Of layouts and points.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.shop, self.dice = Workshop(folder), random.Random(seed)
        self.output_dir = folder / "killed"
        self.checkpoints = self.output_dir / "checkpoints"
        self.report = Report()
        self.layout = LAYOUTS[0]
        self._log = folder / "kill.log"

    def live(self) -> None:
        """One life: a start, steps, a kill.

        Raises:
            AssertionError: something was lost.
        """
        before = self._newest_step()
        layout = self.dice.choice((self.layout, *LAYOUTS))  # the same as before more often than others
        point = self._point(layout)
        self._log.unlink(missing_ok=True)
        options = ["--async_save"] if self.dice.random() < 0.4 else []
        arguments = self._arguments(layout, ENDLESS, *options, "--time_limit", "8")
        result = run_faulty_job(arguments, layout.ranks, kill_at, point, str(self._log), timeout=LIMIT)
        self._check(result, layout, point, before)

    def launched_life(self) -> None:
        """A life from `launch.sh`'s program, whose process is killed; its ranks must end by themselves.

        Raises:
            AssertionError: they do not, or something was lost.
        """
        before = self._newest_step()
        options = ["--num_gpus", "2", "--failure_timeout", "10"]
        command = [sys.executable, str(LAUNCH), *options, *self._arguments(LAYOUTS[0], ENDLESS)]
        with (self.shop.folder / "launch.log").open("w") as log:
            launch = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | CPU_ENVIRONMENT)
        time.sleep(self.dice.uniform(*LAUNCH_SECONDS))
        assert launch.poll() is None, (self.shop.folder / "launch.log").read_text()
        launch.kill()
        launch.wait()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := running_with(str(self.output_dir))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
        assert self._newest_step() >= before
        self.report.killed["launcher"] += 1
        self.layout = LAYOUTS[0]

    def finish(self) -> None:
        """The last life is not killed. All of them together are one run that never was.

        Raises:
            AssertionError: they are not.
        """
        last = self._newest_step() + 2
        run_job(self._arguments(LAYOUTS[0], last), LAYOUTS[0].ranks).check()
        run_job(self._arguments(LAYOUTS[0], last, run="whole"), LAYOUTS[0].ranks).check()
        killed, whole = self.shop.steps("killed"), self.shop.steps("whole")
        assert [line["step"] for line in killed] == list(range(1, last + 1))
        for mine, theirs in zip(killed[:COMPARED_STEPS], whole, strict=False):
            for key, tolerance in TOLERANCE.items():
                difference = abs(mine[key] - theirs[key])
                assert difference <= tolerance * abs(theirs[key]), (key, mine, theirs)
        assert leftovers(self.checkpoints) == [], leftovers(self.checkpoints)
        self.report.step = last

    def _arguments(self, layout: Layout, steps: int, *more: str, run: str = "killed") -> list[str]:
        config = self.shop.config(f"{run}-{LAYOUTS.index(layout)}", **{**SETTINGS, **layout.config})
        keep = ("--keep_last", str(KEEP_LAST), "--keep_every", str(KEEP_EVERY)) if run == "killed" else ()
        saves = ("--save_interval", "1") if run == "killed" else ()
        return self.shop.arguments(run, config, *keep, *saves, "--eval_interval", "0", *more, steps=steps)

    def _point(self, layout: Layout) -> KillPoint:
        delay = self.dice.choice((0.0, self.dice.uniform(0.0, LONGEST_DELAY)))
        rank = self.dice.randrange(layout.ranks)
        event = self.dice.randint(1, self.dice.choice(EVENTS))
        victims = self.dice.choice(("rank", "all"))
        return KillPoint(str(self.checkpoints), rank, event, delay, victims)  # type: ignore[arg-type]

    def _check(self, result: JobResult, layout: Layout, point: KillPoint, before: int) -> None:
        story = f"{layout.name}, {point}, from step {before}\n" + "\n".join(result.stdout + result.stderr)
        if self._log.exists():
            assert any(code == -9 for code in result.exit_codes), story
            self.report.killed[_kind(self._log.read_text())] += 1
        else:
            # Its time was up before the point was reached.
            assert set(result.exit_codes) == {3}, story
            self.report.survived += 1
        started = result.stdout[0]
        if before and "step" in started:
            assert "starting at step 0" not in started, story
        self.report.conversions += "layout changed" in started
        assert self._newest_step() >= before, story
        self.layout = layout

    def _newest_step(self) -> int:
        """Of the checkpoint that the next start resumes from, every byte of which is right; 0: none."""
        checkpoint = find_checkpoint(str(self.output_dir), "auto")
        if checkpoint is None:
            return 0
        assert wrong_files(checkpoint) == []
        return checkpoint.state.step


def wrong_files(checkpoint: Checkpoint) -> list[str]:
    """The files whose content is not what the manifest says."""
    return [
        name for name, entry in checkpoint.files.items() if digest_of(checkpoint.path / name) != entry.digest
    ]


def leftovers(folder: Path) -> list[str]:
    """What lies among checkpoints and should not, after a run that ended by itself."""
    named = sorted(path.name for path in folder.iterdir() if path.name not in {"latest", "lineage.json"})
    return [name for name in named if not name.removeprefix("global_step").isdecimal()]


def running_with(argument: str) -> list[list[str]]:
    """The command lines of processes that have `argument` in theirs."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if argument in line]


def _kind(line: str) -> str:
    """An event in words that do not depend on steps and ranks."""
    event, _, path = line.strip().partition(" ")
    return f"{event} {re.sub('[0-9]+', 'N', path)}"


def killed_run(folder: Path, kills: int, seed: int, say: Any = lambda _: None) -> Report:
    """A run with `kills` lives, then its end.

    Raises:
        AssertionError: something was lost.
    """
    begin = time.monotonic()
    run = KilledRun(folder, seed)
    for life in itertools.count(1):
        if sum(run.report.killed.values()) >= kills:
            break
        run.launched_life() if life % LAUNCH_EVERY == 0 else run.live()
        run.report.seconds = time.monotonic() - begin
        say(run.report)
    run.finish()
    run.report.seconds = time.monotonic() - begin
    return run.report


def main() -> int:
    """The long version; its exit code."""
    parser = argparse.ArgumentParser(description="Kill a run at random points and go on, many times.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def say(report: Report) -> None:
        total = sum(report.killed.values())
        if total % 20 == 0:
            print(f"{total} kills, {report.seconds:.0f} s", flush=True)

    try:
        with tempfile.TemporaryDirectory() as folder:
            print(killed_run(Path(folder), options.kills, options.seed, say))
    finally:
        stop_server()
    return 0


if __name__ == "__main__":
    sys.exit(main())
