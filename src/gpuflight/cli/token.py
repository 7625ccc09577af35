"""``gpuflight token``: the access tokens of a server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuflight.server.tokens import TokenStore

DESCRIPTION = """\
Make, list and revoke the access tokens of gpuflight-server. A token is shown once; the file keeps its hash only. A
server that runs sees the change at its next request. With the first token, nobody comes in without one.

roles: ingest only sends GPU events · viewer reads · operator also sends events and controls collecting ·
admin also manages tokens and subscribers
"""

EXAMPLES = (
    "gpuflight token create --role viewer --name grafana --file tokens.json",
    "gpuflight token list --file tokens.json",
    "gpuflight token revoke grafana --file tokens.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("action", choices=("create", "list", "revoke"), metavar="create|list|revoke", help="what to do")
    parser.add_argument("token", nargs="?", metavar="NAME", help="with revoke: the name or id of the token")
    roles = ("ingest", "viewer", "operator", "admin")
    parser.add_argument("--role", choices=roles, help="with create: what the token may do")
    parser.add_argument("--name", help="with create: a name for it, unique; made from role and id by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("where the tokens are kept", "the first of these; see `server.auth.store_file`")
    group.add_argument("--file", metavar="PATH", help="this file")
    group.add_argument("--config", metavar="FILE", help="the file that these settings of the server name")


def run(arguments: argparse.Namespace) -> int:
    """Do the action."""
    from gpuflight.errors import InputError
    from gpuflight.server.tokens import TokenStore

    store = TokenStore(_path(arguments))
    action, which = arguments.action, arguments.token
    if action != "create" and (arguments.role or arguments.name):
        raise InputError(f"--role and --name go with create, not with {action}")
    if action == "create":
        if which is not None:
            raise InputError(f"the name of a new token is given by --name: --name {which}")
        if arguments.role is None:
            raise InputError("create needs --role ingest, --role viewer, --role operator or --role admin")
        return _create(store, arguments)
    if action == "list":
        if which is not None:
            raise InputError("list takes no name")
        return _list(store, arguments.json)
    if which is None:
        raise InputError("revoke needs the name or id of a token; `gpuflight token list` shows them")
    return _revoke(store, which, arguments.json)


def _path(arguments: argparse.Namespace) -> str:
    from gpuflight.server.tokens import default_store_path
    from gpuflight.settings import load

    path: str = arguments.file or load(arguments.config).server.auth.store_file or default_store_path()
    return path


def _create(store: TokenStore, arguments: argparse.Namespace) -> int:
    from gpuflight.cli.output import emit_json
    from gpuflight.server.tokens import Role

    token, info = store.create(Role.of(arguments.role), arguments.name)
    if arguments.json:
        emit_json({"token": token, **info.public()})
        return 0
    # The token alone on stdout: `TOKEN=$(gpuflight token create --role viewer)`.
    print(f"{info.role} token {info.name}, kept as a hash in {store.path}; it is shown only now:", file=sys.stderr)
    print(token)
    return 0


def _list(store: TokenStore, as_json: bool) -> int:
    from gpuflight.cli.output import console, emit_json, make_table

    found = [info.public() for info in store.all()]
    if as_json:
        emit_json({"tokens": found})
    elif found:
        rows = [[info["name"], info["role"], info["id"], info["created"]] for info in found]
        console().print(make_table([("name", {"overflow": "fold"}), "role", "id", "created"], rows))
    else:
        console().print("none")
    return 0


def _revoke(store: TokenStore, which: str, as_json: bool) -> int:
    from gpuflight.cli.output import emit_json

    info = store.revoke(which)
    if as_json:
        emit_json({"revoked": info.public()})
    else:
        print(f"{info.name} is revoked")
    return 0
