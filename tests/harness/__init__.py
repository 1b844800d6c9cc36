"""Distributed tests on one machine: run a function on several gloo ranks, imports paid once.

    from tests.harness import init_deepspeed_distributed, run_ranks

    def sum_of_ranks():                                  # top level of the test module
        init_deepspeed_distributed()
        ...
        return value

    def test_sum():
        assert run_ranks(sum_of_ranks, 4) == [6, 6, 6, 6]

Four layers of processes, each started by the one above and ended with it:

    pytest ── fork server ── supervisor ── ranks 0 .. n-1
              imports torch   one per call;   one per rank;
              and deepspeed   imports the     call the function
              once            test module

The fork server is a process of its own because a fork copies the calling thread only: pytest and its
plugins may hold threads and locks, the server has none. Ranks never see a GPU.
"""

from tests.harness.client import RankFailure, run_ranks, statistics, stop_server
from tests.harness.job import JobResult, run_job
from tests.harness.rank import init_deepspeed_distributed

__all__ = [
    "JobResult",
    "RankFailure",
    "init_deepspeed_distributed",
    "run_job",
    "run_ranks",
    "statistics",
    "stop_server",
]
