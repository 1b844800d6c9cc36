"""What the network test found: which links are wrong, cut or slow, and the bandwidths."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from pipeline.base.problems import Problem
from pipeline.base.words import few
from pipeline.launch.network_test.network_test import NetworkTest

# A link that is below this share of the median of its kind in every round is named.
SLOW_SHARE = 0.5
# Fewer of a kind have no median to speak of.
_LEAST_OF_A_KIND = 3
# Processes that want to run, per core, above which a host's own rates are left to chance.
BUSY = 1.0
# Hosts of a matrix that still fits a terminal.
MATRIX_HOSTS = 12
_KINDS = {"world": "all ranks", "host": "inside hosts", "slot": "between hosts"}
_SUMMARY = ("slowest", "median", "fastest")
Pair = tuple[int, int]


def network_problems(found: NetworkTest) -> list[Problem]:
    """Errors for what is cut, fails or gives wrong sums; warnings for what is slow."""
    problems = [*_silent(found), *_unreached(found)]
    if found.started:
        slow = [*_slow_sends(found), *_slow_groups(found)]
        # A CPU that is shared with others slows the links of some ranks, which says nothing of the network.
        problems += [*_failed(found), *dict.fromkeys(_wrong(found))]
        problems += (_busy(found) or slow) if slow else []
    return problems


def _busy(found: NetworkTest) -> list[Problem]:
    """CPU hosts that had more to do than cores before the test came."""
    if found.world.device != "cpu":
        return []
    return [
        Problem(
            found.world.hosts[number].name,
            f"{load:.1f} processes per core",
            "is busy with other work, so that slow rates say nothing of its links",
            "Try again when it is idle",
            "warning",
        )
        for number, load in sorted(found.loads.items())
        if load > BUSY
    ]


def _silent(found: NetworkTest) -> Iterator[Problem]:
    for number, why in found.silent:
        name = found.world.hosts[number].name
        remedy = "See what --hosts says of it, then try again"
        yield Problem(f"{name}: network test", "no answer", why, remedy)


def _unreached(found: NetworkTest) -> Iterator[Problem]:
    hosts = found.world.hosts
    for source, target, reason in found.unreached:
        rule = f"{hosts[source].name} makes no connection to {hosts[target].name}, which listens"
        remedy = "Open all ports between the hosts (firewall, security group), and compare their /etc/hosts"
        yield Problem(f"{hosts[source].name} -> {hosts[target].name}", reason, rule, remedy)


def _failed(found: NetworkTest) -> Iterator[Problem]:
    """The first failures; the others are their consequences. Without any, the ranks that hang."""
    failures = [event for event in found.events if event["at"] == "failed"]
    killed = [event for event in found.events if event["at"] == "ended" and event["code"] < 0]
    remedy = "Set NCCL_DEBUG=INFO in .deepspeed_env and try again; see dmesg on that host"
    if found.world.device == "cpu":
        remedy = "See dmesg on that host; GLOO_SOCKET_IFNAME in .deepspeed_env names the network card to use"
    if failures and not killed:  # those of the others are closed connections
        first = failures[0]
        rule = f"it fails after '{first['after']}' ({first['error'].splitlines()[0]})"
        yield Problem(_name(found, first["rank"]), first["after"], rule, remedy)
    for event in killed:
        yield Problem(
            _name(found, event["rank"]), event["code"], f"it is killed by signal {-event['code']}", remedy
        )
    if failures or killed:
        return
    last = {event["rank"]: event["at"] for event in found.events if "rank" in event}
    hanging = [rank for rank in range(found.world.size) if last.get(rank) != "done"]
    if hanging:
        names = few(_name(found, rank) for rank in hanging)
        at = last.get(hanging[0], "the start")
        yield Problem(names, at, f"no end after '{at}': a link of theirs swallows what is sent", remedy)


def _wrong(found: NetworkTest) -> Iterator[Problem]:
    parts = "memory and network cards" if found.world.device == "cpu" else "memory, GPUs and network cards"
    remedy = f"Take the host out, and test its {parts}"
    for event in found.events:
        if event.get("right", True):
            continue
        if event["at"] == "send":
            key, rule = _link(found, event["from"], event["to"]), "what arrives is not what was sent"
        else:
            ranks = few(_name(found, rank) for rank in event["ranks"])
            key, rule = _name(found, event["rank"]), f"its result of an {event['at']} of {ranks} is wrong"
        yield Problem(key, "wrong", rule, remedy)


def host_pairs(found: NetworkTest) -> dict[Pair, list[float]]:
    """Bandwidths of the sends from host to host, in bytes/s, of each link the best round; from a host to
    itself: between its ranks."""
    links: dict[Pair, float] = {}
    for event in found.events:
        if event["at"] == "send":
            link = event["from"], event["to"]
            links[link] = max(event["bandwidth"], links.get(link, 0.0))
    pairs: dict[Pair, list[float]] = defaultdict(list)
    for (source, target), rate in links.items():
        pairs[_host(found, source), _host(found, target)].append(rate)
    return pairs


def _slow_sends(found: NetworkTest) -> Iterator[Problem]:
    """One line for a host whose every link is slow, else one for each pair of hosts."""
    pairs = host_pairs(found)
    for inside in (False, True):
        kind = {pair: rates for pair, rates in pairs.items() if (pair[0] == pair[1]) == inside}
        rates = [rate for each in kind.values() for rate in each]
        if len(rates) < _LEAST_OF_A_KIND:
            continue
        limit = SLOW_SHARE * statistics.median(rates)
        slow = {pair: min(each) for pair, each in kind.items() if min(each) < limit}
        yield from _name_slow(found, slow, kind, statistics.median(rates))


def _name_slow(
    found: NetworkTest, slow: Mapping[Pair, float], kind: Mapping[Pair, Sequence[float]], median: float
) -> Iterator[Problem]:
    hosts = found.world.hosts
    bad = [number for number in range(len(hosts)) if _all_slow(number, slow, kind)]
    tools = "ethtool" if found.world.device == "cpu" else "ibstat, ethtool, nvidia-smi topo -m"
    remedy = f"Compare its cards and cables with the others': {tools}"
    for number in bad:
        rate = min(rate for pair, rate in slow.items() if number in pair)
        rule = f"every link of it is slow: the median elsewhere is {_rate(median)}"
        yield Problem(hosts[number].name, _rate(rate), rule, remedy, "warning")
    for (source, target), rate in slow.items():
        if source not in bad and target not in bad:
            one, other = hosts[source].name, hosts[target].name
            key = f"inside {one}" if source == target else f"{one} -> {other}"
            rule = f"a link there is slow: the median of its kind is {_rate(median)}"
            yield Problem(key, _rate(rate), rule, remedy, "warning")


def _all_slow(number: int, slow: Mapping[Pair, float], kind: Mapping[Pair, Sequence[float]]) -> bool:
    """Whether a host of three or more, and so the host itself, explains its slow links."""
    own = [pair for pair in kind if number in pair and pair[0] != pair[1]]
    return len(own) > 2 and all(pair in slow for pair in own)


def _slow_groups(found: NetworkTest) -> Iterator[Problem]:
    remedy = "See the sends of the same ranks"
    if found.world.device == "cuda":
        remedy += "; where they are fast, NCCL_DEBUG=INFO shows the way that NCCL takes"
    for (name, kind), groups in collectives(found).items():
        if kind == "world" or len(groups) < _LEAST_OF_A_KIND:
            continue
        median = statistics.median(groups.values())
        for ranks, rate in groups.items():
            if rate < SLOW_SHARE * median:
                key = f"{name} of {few(_name(found, rank) for rank in ranks)}"
                rule = f"slow: the median of the others is {_rate(median)}"
                yield Problem(key, _rate(rate), rule, remedy, "warning")


def collectives(found: NetworkTest) -> dict[tuple[str, str], dict[tuple[int, ...], float]]:
    """Bandwidth of each group's slowest rank in the best round, by collective and kind of group."""
    rounds: dict[tuple[str, str, tuple[int, ...]], dict[int, float]] = defaultdict(dict)
    for event in found.events:
        if event["at"] in ("all-reduce", "all-to-all"):
            rates = rounds[event["at"], event["kind"], tuple(event["ranks"])]
            rates[event["round"]] = min(event["bandwidth"], rates.get(event["round"], event["bandwidth"]))
    result: dict[tuple[str, str], dict[tuple[int, ...], float]] = defaultdict(dict)
    for (name, kind, ranks), rates in rounds.items():
        result[name, kind][ranks] = max(rates.values())
    return result


def network_tables(found: NetworkTest) -> Iterator[Table]:
    """Collectives, then sends from host to host, the slowest link of each pair, in GB/s; none of a test that
    measured nothing."""
    if not collectives(found):
        return
    table = _table("Collectives, GB/s per rank", _SUMMARY)
    for (name, kind), groups in collectives(found).items():
        table.add_row(f"{name}, {_KINDS[kind]}", *_summary(list(groups.values())))
    yield table
    if pairs := host_pairs(found):
        yield _sends_table([host.name for host in found.world.hosts], pairs)


def _sends_table(hosts: Sequence[str], pairs: Mapping[Pair, Sequence[float]]) -> Table:
    if len(hosts) <= MATRIX_HOSTS:
        table = _table("Sends, GB/s", hosts)
        for source, name in enumerate(hosts):
            cells = [pairs.get((source, target)) for target in range(len(hosts))]
            table.add_row(Text(name), *(_gigabytes(min(rates)) if rates else "-" for rates in cells))
        return table
    table = _table("Sends, GB/s", _SUMMARY)
    for name, inside in (("between hosts", False), ("inside hosts", True)):
        kind = [rates for pair, rates in pairs.items() if (pair[0] == pair[1]) == inside]
        if rates := [rate for each in kind for rate in each]:
            table.add_row(name, *_summary(rates))
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(box=None, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _summary(rates: Sequence[float]) -> list[str]:
    return [_gigabytes(each) for each in (min(rates), statistics.median(rates), max(rates))]


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g}"


def _rate(rate: float) -> str:
    return f"{_gigabytes(rate)} GB/s"


def _host(found: NetworkTest, rank: int) -> int:
    ends = 0
    for number, host in enumerate(found.world.hosts):
        ends += host.slots
        if rank < ends:
            return number
    raise ValueError(f"rank {rank} is not one of {found.world.size}")


def _name(found: NetworkTest, rank: int) -> str:
    return f"rank {rank} ({found.world.hosts[_host(found, rank)].name})"


def _link(found: NetworkTest, source: int, target: int) -> str:
    return f"{_name(found, source)} -> {_name(found, target)}"
