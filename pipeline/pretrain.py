"""Pretrain a GPT: ``deepspeed pipeline/pretrain.py [options]``, or by torchrun, or alone.

A launcher starts this script once per rank. That process becomes the rank's agent, and starts the script
again as the rank (`pipeline.cluster.agent.agent`).

Every rank reads the job for itself and comes to the same result. A wrong job is refused here, before torch is
imported. Exit codes: 0 finished, 2 wrong job, 3 stopped with a checkpoint saved, 1 anything else.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # A script's own folder comes first on sys.path; the package is one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from pipeline.cluster.agent.agent import own_rank

    own_rank(sys.argv)  # a launcher's process is the agent and never gets further; the rank does

from pipeline.cluster.agent.rank_link import Inherited, RankLink
from pipeline.training.rank import live, live_owned, run_rank


def main(arguments: Sequence[str], link: RankLink | None = None, inherited: Inherited | None = None) -> int:
    """One rank's whole life; its exit code. See `live`."""
    return live(run_rank, arguments, link, inherited)


if __name__ == "__main__":
    live_owned(run_rank)
