"""Several real hosts on one machine, to start, connect and break.

    def test_two_hosts(make_hosts):                      # or: with Hosts(2) as hosts:
        hosts = make_hosts(2)                            # h0 to log in and launch from, workers h1 and h2
        done = hosts.run("h0", ["ssh", "h2", "hostname"], timeout=10)
        assert done.stdout == "h2\n"
        job = hosts.start("h0", [...])                   # goes on meanwhile
        hosts.crash("h2")
        assert job.wait(60) != 0
        assert hosts.processes("h1") == []               # nothing is left

A host is a set of network, host name, IPC, mount and process namespaces. Its first process is an sshd. It has
an address on a bridge, a name that the others resolve, and its own HOME, /run, /dev/shm and process ids:
`pkill` there reaches nobody else. The rest of the file system is this machine's, the project and its
interpreter included, so that ``shared=True`` hosts have one file system. With ``shared=False`` each host has
its own small disk at `Hosts.folder`, empty at first.

All hosts live inside one more process namespace. It ends with the process that made it, whatever ends that
one, and everything in it ends with it: this machine's own network, mounts, ~/.ssh and processes are not
touched.
"""

from tests.hosts.hosts import Hosts
from tests.hosts.process import HostProcess
from tests.hosts.requirements import why_no_hosts

__all__ = ["HostProcess", "Hosts", "why_no_hosts"]
