"""Checks of folders, clocks, names and the rendezvous, and of the exchange itself."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pipeline.base.words import few, size
from pipeline.launch.host_check.ask import HostReport
from pipeline.launch.host_check.comparison import Check, Fault, Finding, Survey, each, failed, known

# Logs of hosts whose clocks differ by more cannot be read side by side; object stores refuse requests that
# are minutes off.
CLOCK_WARNING_SECONDS, CLOCK_ERROR_SECONDS = 2.0, 60.0

# A home folder may be shared with hosts of other jobs, one of which may be compiling. That takes minutes.
_COMPILING_SECONDS = 1800


def _folder_test(report: HostReport, survey: Survey) -> Fault | None:
    for place, (path, found) in enumerate(report.facts["folders"].items()):
        needed = survey.cache_bytes
        if place == 0:  # hosts with a disk of their own hold their ranks' part of a checkpoint
            sharing = [each for each in report.seen.get(path, []) if each < len(survey.answers.hosts)]
            needed = survey.output_bytes * max(1, len(sharing)) // len(survey.answers.hosts)
        if not found["writable"]:
            rule = f"{path} cannot be made: {found['nearest']} may not be written"
            return path, rule, "See to its permissions, or name another folder"
        if found["free"] < needed:
            rule = f"{size(found['free'])} are free at {found['nearest']}, and the job needs {size(needed)}"
            return path, rule
    return None


def _nearest(check: Check, survey: Survey) -> Iterator[Finding]:
    """A mount that is missing on one host shows in the folder above it."""
    for path in survey.here["folders"] if not failed(survey.here, "folders") else ():
        nearest = {each.host.name: each.facts["folders"][path]["nearest"] for each in known(check, survey)}
        deepest = max(nearest.values(), key=len, default="")
        for name, found in nearest.items():
            if len(found) < len(deepest):
                rule = f"the nearest folder that exists there is {found}, and {deepest} elsewhere"
                yield Finding(
                    name, path, rule, "See whether a file system is not mounted on {host}", "warning"
                )


def _show_folders(found: dict[str, Any]) -> str:
    return "; ".join(f"{size(each['free'])} free ({each['type']})" for each in found.values())


def file_systems(survey: Survey) -> list[list[str]]:
    """The hosts whose output folders are one file system, group by group."""
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    here = len(survey.answers.hosts)
    for report in survey.hosts:
        if seen := next(iter(report.seen.values()), None):
            groups[tuple(place for place in seen if place != here)].append(report.host.name)
    return list(groups.values())


def _partly_shared(check: Check, survey: Survey) -> Iterator[Finding]:
    groups = file_systems(survey)
    if len(groups) < 2 or all(len(group) == 1 for group in groups):
        return
    largest = max(groups, key=len)
    for group in groups:
        if group is not largest:
            for name in group:
                yield Finding(name, "its own", f"the output folder of {few(largest)} is another file system")


def _show_sharing(report: HostReport) -> str:
    seen = next(iter(report.seen.values()), [])
    return "" if not seen else "its own" if len(seen) == 1 else "shared"


def _locks(report: HostReport, survey: Survey) -> Fault | None:
    held = {lock["path"] for other in survey.hosts for lock in _locks_of(other) if lock["held"]}
    stale = [lock for lock in _locks_of(report) if lock["path"] not in held]
    if not stale:
        return None
    value = ", ".join(f"{lock['path']} ({lock['age'] / 60:.0f} min old)" for lock in stale[:3])
    rule = (
        "no process of these hosts holds this lock of a compiled op; a job that uses it would wait for ever"
    )
    paths = " ".join(lock["path"] for lock in stale)
    remedy = f"On {{host}}: rm {paths}"
    if all(lock["age"] < _COMPILING_SECONDS for lock in stale):
        return value, rule, f"If no other host compiles it now: {remedy}", "warning"
    return value, rule, remedy


def _locks_of(report: HostReport) -> list[dict[str, Any]]:
    return [] if failed(report.facts, "locks") else report.facts["locks"]


def _clock(report: HostReport, survey: Survey) -> Fault | None:
    ahead = report.clock
    if abs(ahead) <= CLOCK_WARNING_SECONDS:
        return None
    rule = f"its clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    severity = "error" if abs(ahead) > CLOCK_ERROR_SECONDS else "warning"
    return f"{ahead:+,.0f} s", rule, None, severity


def unreachable_names(survey: Survey) -> dict[str, tuple[str, str]]:
    """(what it is, why it will not do) of the address that each host has for its own name, of hosts where it
    leads away from the others: gloo listens there, and tells the others to come."""
    if len(survey.answers.hosts) == 1 or survey.interface:
        return {}
    found = {}
    for place, report in enumerate(survey.answers.hosts):
        if report.failure is not None or failed(report.facts, "names"):
            continue
        own, host = report.facts["names"], report.host.name
        tried = {other.host.name: other.unreached["own"].get(str(place)) for other in survey.hosts}
        cut = [other.host.name for other in survey.hosts if str(place) in other.unreached["net"]]
        reasons = {other: why for other, why in tried.items() if why and other not in cut}
        if not own or all(map(_is_loopback, own)):
            leads, why = own[0] if own else "nothing that it knows", "no other host reaches it there"
        elif reasons:
            leads = (report.facts["doors"]["own"] or own)[0]
            why = f"{few(reasons)} cannot reach it there ({next(iter(reasons.values()))})"
        else:
            continue
        name = report.facts["machine"]["host"]
        found[host] = own[0] if own else "unknown", f"the host takes its own name ({name}) for {leads}: {why}"
    return found


def common_interface(survey: Survey) -> str | None:
    """The network interface that ranks must be told, since the names of some hosts lead elsewhere: that of
    the network by which they were asked, where all have it by one name, and reach each other on it."""
    if not unreachable_names(survey) or any(report.unreached["net"] for report in survey.hosts):
        return None
    interfaces = {report.facts.get("doors", {}).get("interface") for report in survey.hosts}
    return next(iter(interfaces)) if len(interfaces) == 1 else None


def _own_name(check: Check, survey: Survey) -> Iterator[Finding]:
    interface = common_interface(survey)
    for host, (value, rule) in unreachable_names(survey).items():
        if interface is not None:
            used = f"ranks are told to use {interface} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            yield Finding(host, value, f"{rule}; {used}", severity="warning")
        else:
            yield Finding(host, value, rule)


def _links(check: Check, survey: Survey) -> Iterator[Finding]:
    """What no name can mend."""
    for report in survey.hosts:
        for place, why in report.unreached["net"].items():
            other = survey.answers.hosts[int(place)]
            rule = f"it does not reach {other.host.name} at {other.facts['doors']['net'][0]} ({why})"
            yield Finding(report.host.name, f"-> {other.host.name}", rule)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _port(check: Check, survey: Survey) -> Iterator[Finding]:
    """The first host must be free to listen, and all must come through to it."""
    first = survey.answers.hosts[0]
    port = first.facts.get("port")
    if isinstance(port, str):
        remedy = "Give another port with --master_port, or end the job that listens there"
        yield Finding(first.host.name, port, "rank 0 cannot listen on the port of the rendezvous", remedy)
    for report in known(check, survey):
        if report.reached is not None:
            rule = f"it does not reach rank 0 at {survey.answers.address}, port {port}"
            yield Finding(report.host.name, report.reached, rule)


def _reports(report: HostReport, survey: Survey) -> Fault | None:
    if report.reports is None:
        return None
    rule = f"it does not reach this machine at {survey.launch}, to which its ranks report"
    return report.reports, rule


def _show_reach(report: HostReport) -> str:
    port = report.facts.get("port")
    if port is not None:
        return f"listens on {port}" if isinstance(port, int) else "port taken"
    return "not reached" if report.reached else ""


def _one_machine(check: Check, survey: Survey) -> Iterator[Finding]:
    named: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in known(check, survey):
        named[report.facts["machine"]["host"], report.facts["machine"]["boot"]].append(report.host.name)
    for (own, _), names in named.items():
        for name in names[1:]:
            yield Finding(name, own, f"is the same machine as {names[0]}: its devices would be used twice")


def _noise(report: HostReport, survey: Survey) -> Fault | None:
    if not report.noise:
        return None
    line = report.noise.splitlines()[0][:80]
    return line, "its shell prints this at every login, between the job's lines"


def _programs(report: HostReport, survey: Survey) -> Fault | None:
    missing = [name for name, path in report.facts["commands"].items() if path is None]
    if not missing:
        return None
    rule = "the launcher starts it there, and it is not on the PATH of logins"
    return ", ".join(missing), rule


def _lost(report: HostReport, survey: Survey) -> Fault | None:
    if report.seen or not report.facts["folders"]:
        return None
    return "silent", "it answered once, and then no more: the connection was lost"


SYSTEM = (
    Check(
        "free disk", "folders", _show_folders, (each(_folder_test), _nearest),
        "Make room, or name another folder (--output_dir, --cache_dir)",
    ),
    Check(
        "output folder", "", _show_sharing, (_partly_shared,),
        "Mount it on all hosts, or on none", "warning",
    ),
    Check(
        "compiled ops", "locks", lambda found: f"{len(found)} locked" if found else "", (each(_locks),), "",
    ),
    Check(
        "clock", "", lambda report: f"{report.clock:+.0f} s" if abs(report.clock) >= 1 else "right",
        (each(_clock),), "Set it: chronyd or systemd-timesyncd on every host",
    ),
    Check(
        "own name", "names", few, (_own_name,),
        "In its /etc/hosts give {host} the address of the network that the hosts share, or set "
        "GLOO_SOCKET_IFNAME in .deepspeed_env",
    ),
    Check(
        "rendezvous", "", _show_reach, (_port,),
        "Open the port between the hosts, or give --master_addr ADDRESS in the network that they share",
    ),
    Check(
        "links", "", lambda report: "", (_links,),
        "See to the routes and firewalls between them: ranks there would not meet. --fabric tries every link",
        "warning",
    ),
    Check(
        "reports", "", lambda report: "arrive" if report.reports is None else "lost", (each(_reports),),
        "Open this machine's ports to the hosts, or give --launch_addr, its address as they reach it",
    ),
    Check(
        "machine", "machine", lambda found: found["host"], (_one_machine,),
        "Keep one line per machine in the hostfile",
    ),
    Check("shell", "", lambda report: "noisy" if report.noise else "", (each(_noise),),
        "Move it in the start-up file behind a test for an interactive shell", "warning",
    ),
    Check(
        "launcher", "commands", lambda found: ", ".join(name for name, path in found.items() if path),
        (each(_programs),), "Install this machine's version of the launcher on {host}, at the same path",
    ),
    Check("connection", "", lambda report: "", (each(_lost),), "Try again; ping {host}"),
)  # fmt: skip
