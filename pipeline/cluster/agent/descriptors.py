"""How many files, pipes and connections this process may have open at once. No torch."""

from __future__ import annotations

import resource


def make_room(descriptors: int) -> None:
    """Raise the soft limit, usually 1,024, as far as is needed and the hard one allows."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        wanted = descriptors if most == resource.RLIM_INFINITY else min(descriptors, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))
