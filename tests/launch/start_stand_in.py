"""launch.sh for stand-in ranks: start_stand_in.py [launcher options] FOLDER STEPS SECONDS [FAULT ...]"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from pipeline.base.command import say, show_messages
from pipeline.cluster.launcher_options import split_arguments
from pipeline.cluster.world import resolve_world
from pipeline.launch.start import start_once

options, job = split_arguments(sys.argv[1:])
world = resolve_world(options.hostfile, num_gpus=options.num_gpus)
stand_in = Path(__file__).parents[1] / "cluster" / "agent" / "stand_in.py"
show_messages(say, "pipeline.cluster.agent")  # as the launch does
sys.exit(start_once(world, job[0], options, job, script=stand_in).exit_code)
