"""``gpuflight trigger``: orders to the recorders of programs that run."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from gpuflight.cli.rest import Rest
from gpuflight.errors import GpuflightError, InputError

if TYPE_CHECKING:
    from gpuflight.settings import Settings

DESCRIPTION = """\
Tell the recorders of running programs to record now, to stop, to write out what they hold, or what they do
(docs/recorder.md). Programs are recorded if they were started with `gpuflight run` or call gpuflight.init().

On this host by default, below the folders that the collector `sessions` follows; with --hosts or --remotes by the
gpuflight-servers of other hosts, all at once. What some cannot do does not keep the others: each has its own line, and
the command ends with 1 if any failed, or if what was chosen runs nowhere.
"""

EXAMPLES = (
    "gpuflight trigger status",
    "gpuflight trigger --pid 4711 --for 10",
    "gpuflight trigger --name train.py --launches 100000 --stacks 100",
    "gpuflight trigger stop --all",
    "gpuflight trigger --job 8812 --for 5 --hosts http://node1:9477 http://node2:9477 --token-file token",
    "gpuflight trigger --job 8812 --for 5 --remotes --config server.json",
)

_MOST_HOSTS = 1024
_ROOT = "/api/v1/recorders/trigger"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    actions = ("start", "stop", "flush", "status")
    parser.add_argument(
        "action", nargs="?", choices=actions, default="start", metavar="ACTION", help=f"{', '.join(actions)}"
    )
    which = parser.add_argument_group("which programs (those that any of these names)")
    which.add_argument("--all", action="store_true", help="all that are recorded; of status the default")
    which.add_argument("--pid", metavar="PID", type=_count, action="append", default=[], help="a process")
    which.add_argument("--name", metavar="APP", action="append", default=[], help="a program by its name")
    which.add_argument("--job", metavar="ID", action="append", default=[], help="all ranks of a job")
    which.add_argument("--session", metavar="ID", action="append", default=[], help="a session")
    how = parser.add_argument_group("with start")
    how.add_argument("--for", metavar="S", dest="for_s", type=_seconds, default=0.0, help="stop after so long")
    how.add_argument("--launches", metavar="N", type=_count, default=0, help="stop when so many kernels were seen")
    how.add_argument("--stacks", metavar="N", type=_count, help="with the Python stack of every Nth launch")
    where = parser.add_argument_group("where")
    where.add_argument("--folder", metavar="DIR", action="append", default=[], help="sessions of this host, elsewhere")
    where.add_argument("--hosts", metavar="URL", nargs="+", default=[], help="by these gpuflight-servers")
    where.add_argument("--remotes", action="store_true", help="by the servers in `remotes` of the settings")
    where.add_argument("--config", metavar="FILE", help="these settings")
    where.add_argument("--token-file", metavar="FILE", help="with --hosts: the file with the token of an operator")
    where.add_argument("--ca-file", metavar="FILE", help="with --hosts: PEM certificates to trust")
    where.add_argument(
        "--timeout", metavar="S", type=_seconds, default=10.0, help="longest wait per host (default 10 s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Tell them, and print what came of it."""
    if not (arguments.pid or arguments.name or arguments.job or arguments.session or arguments.all):
        if arguments.action != "status":
            raise InputError("which programs? give --pid, --name, --job, --session or --all")
        arguments.all = True
    if arguments.action != "start" and (arguments.for_s or arguments.launches or arguments.stacks is not None):
        raise InputError(f"--for, --launches and --stacks go with start, not with {arguments.action}")
    far = bool(arguments.hosts or arguments.remotes)
    if far and arguments.folder:
        raise InputError("--folder is for recorders of this host")
    hosts = _ask_hosts(_servers(arguments), _order(arguments), arguments.timeout) if far else [_ask_here(arguments)]
    missing = [set(host.pop("unmatched", ())) for host in hosts if "reason" not in host]
    unmatched = set.intersection(*missing) if missing else set()
    failed = sum(host["failed_count"] + ("reason" in host) for host in hosts)
    done = sum(host["done_count"] for host in hosts)
    result = {"done_count": done, "failed_count": failed, "unmatched": sorted(unmatched), "hosts": hosts}
    if arguments.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print(result)
    return int(bool(failed or unmatched or (not done and arguments.action != "status")))


def _order(arguments: argparse.Namespace) -> dict[str, Any]:
    order: dict[str, Any] = {"do": arguments.action, "all": arguments.all, "timeout_s": min(arguments.timeout / 3, 60)}
    order |= {"pids": arguments.pid, "names": arguments.name, "jobs": arguments.job, "sessions": arguments.session}
    return order | {"for_s": arguments.for_s, "launches": arguments.launches, "stacks": arguments.stacks}


def _ask_here(arguments: argparse.Namespace) -> dict[str, Any]:
    import msgspec

    from gpuflight.collectors.sessions import WELL_KNOWN
    from gpuflight.events.reading import folders_of
    from gpuflight.events.recorder.control import Request
    from gpuflight.events.recorder.trigger import Choice, trigger

    folders = arguments.folder or _settings(arguments).collectors.get("sessions", {}).get("folders") or WELL_KNOWN
    named = (arguments.pid, arguments.name, arguments.job, arguments.session)
    choice = Choice(arguments.all, *map(tuple, named))
    stacks, launches = arguments.stacks, arguments.launches
    request = Request(arguments.action, for_s=arguments.for_s, launches=launches, stacks=stacks)
    result = trigger(folders_of(folders), choice, request, arguments.timeout / 3)
    done = sum(outcome.status == "done" for outcome in result.outcomes)
    return {
        "hostname": socket.gethostname(),
        "done_count": done,
        "failed_count": len(result.outcomes) - done,
        "recorders": [msgspec.to_builtins(outcome) for outcome in result.outcomes],
        "unmatched": result.unmatched,
    }


def _settings(arguments: argparse.Namespace) -> Settings:
    from gpuflight.settings import load

    return load(arguments.config)


def _servers(arguments: argparse.Namespace) -> list[Rest]:
    """Raises InputError for what cannot be one."""
    common = {"token_file": arguments.token_file, "ca_file": arguments.ca_file, "timeout": arguments.timeout}
    found = [Rest(Namespace(url=url, **common)) for url in dict.fromkeys(arguments.hosts)]
    if arguments.remotes:
        for remote in _settings(arguments).remotes:
            token = remote.token.get_secret_value() if remote.token is not None else ""
            timeout_s = remote.timeout_s or arguments.timeout
            facts = {"token_file": None, "token_text": token, "ca_file": remote.ca_file, "timeout": timeout_s}
            found.append(Rest(Namespace(url=remote.url, **facts)))
    if not found:
        raise InputError("the settings have no `remotes`")
    if len(found) > _MOST_HOSTS:
        raise InputError(f"{len(found)} hosts at once are more than {_MOST_HOSTS}")
    return found


def _ask_hosts(servers: list[Rest], order: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
    """Each in a thread of its own; one that hangs (in a name server, say) is left behind."""
    answers: list[dict[str, Any]] = [{} for _ in servers]

    def ask(number: int) -> None:
        try:
            found = servers[number].call("POST", _ROOT, order)
            if not isinstance(found.get("recorders"), list):
                raise GpuflightError("that server knows no recorders")
            answers[number] = {"url": servers[number].url, **found}
        except GpuflightError as error:
            answers[number] = _failed(servers[number].url, str(error).splitlines()[0])

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(len(servers))]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + within_s + 1
    for thread in threads:
        thread.join(max(until_s - time.monotonic(), 0))
    late = f"no answer within {within_s:g} s"
    return [answer or _failed(server.url, late) for server, answer in zip(servers, list(answers), strict=True)]


def _failed(url: str, reason: str) -> dict[str, Any]:
    return {"url": url, "reason": reason, "done_count": 0, "failed_count": 0, "recorders": []}


def _print(result: dict[str, Any]) -> None:
    lines = []
    for host in result["hosts"]:
        where = host.get("hostname") or host["url"]
        if "reason" in host:
            lines.append(f"{where}: failed: {host['reason']}")
        for one in host["recorders"]:
            who = f"{where}: pid {one.get('pid', '?')} {one.get('app', '')}".rstrip() + f" ({one['session_id']})"
            why = one.get("reason") or one.get("why")
            job = f", job {one['job']}" if one.get("job") else ""
            state = f", {one['state']}" if one.get("state") else ""
            lines.append(f"{who}{job}: {one['status']}{state}{': ' + why if why else ''}")
    lines += [f"nothing that is recorded: {word}" for word in result["unmatched"]]
    if not lines:
        lines.append("no program is being recorded")
    text = "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    sys.stdout.write(text + "\n")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must not be negative")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 31_536_000:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 seconds")
    return value
