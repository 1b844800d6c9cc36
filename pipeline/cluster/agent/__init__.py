"""What owns the ranks of a start, from the launcher's first process to the last one's end.

              launch.sh (pipeline.launch)
        starts │                   │ has
               ▼                   ▼
           launcher           coordinator            rank_table, progress, host_inquiry
               │ starts            ▲
               │ on every host     │ one connection for each agent: launch_spec, handshake, connection
        ┌──────┴──────┐            │
        ▼             ▼            │
      agent         agent ─────────┤                 agent, coordinator_client
        │ starts      │ starts     │
        ▼             ▼            │
      rank 0        rank 1         └── (every agent)
        └ workers     └ workers                      rank_process, rank_link, rank_output

Who starts whom: `./launch.sh` has the coordinator and starts the launcher (`launch.launcher_process`), which
starts `pretrain.py` once for each rank. Such a process is the rank's agent. When the coordinator has named
the rendezvous it starts `pretrain.py` again, as the rank. Without `./launch.sh` rank 0's agent has the
coordinator.

Who hears whom: a rank reports to its agent, the agent to the coordinator, and the coordinator orders. Agents
and coordinator never wait for each other: each sends a sign of life every few seconds, and who is silent for
half of `--failure_timeout`, or whose connection closes, is gone.

What ends what:

    a rank fails             the coordinator names the first failure, and orders agents to end their ranks:
                             these get a grace, and are then killed with everything that they have started
    an agent ends            the system kills its rank; the coordinator ends the others
    the launcher ends        agents look at their parent, and over DeepSpeed's at the ssh that has started it;
                             `./launch.sh` at its child: both end the ranks, which save first where there is
                             no `./launch.sh`
    the coordinator ends     its agents lose it, and each ends its rank
    a host, a cable          both sides notice the silence, and each ends what it has
    all ranks have ended     the coordinator concludes the outcome; agents write it, and leave with its code

A failed job is started again by `launch.restart_loop`, and by nothing in here.

Why not torchrun's agents? Measured with `torch.distributed.run` of torch 2.13, c10d rendezvous, two hosts
with two ranks each, through the same launcher; beside it `./launch.sh`:

    rank killed        ends after 4.3 s, or restarts after 3.3 to 15 s        4.7 s, cause named
    host crashes       1.9 s, code 255, or continues alone after 18 s           2.6 s, named
    cable cut          not ended after 100 to 150 s, all ranks left           42 to 48 s, named, none left
    an agent killed    its ranks were still training 20 s later               2.3 s, none left

They have no exit codes 2 and 3 and no save at a stop that all ranks agree on, and do not name the first
failure.

There is an agent for each rank, so it must be small and start quickly: Python without torch.
"""
