"""Looking over users' probes without attaching them: TOML, C, places, and the verifier where we may ask it."""

from __future__ import annotations

import os

from msgspec import Struct, field

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.bpf.toml_lines import TomlLines
from gpuflight.sources.bpf.user_probe_everywhere import sweep
from gpuflight.sources.bpf.user_probe_folder import Found, scan_folder
from gpuflight.sources.bpf.user_probe_places import NoPlace, find_place
from gpuflight.sources.bpf.user_probe_spec import ProbeMistake, Spec
from gpuflight.sources.bpf.user_probes import check_source, claims, load_user_probe, read_spec


class Checked(Struct):
    """What is to be said of one probe. ``mistakes``: it will not work so. ``unchecked``: what could not be looked at
    here, and why. ``metrics``: what it gives, as KIND.METRIC."""

    name: str
    file: str
    description: str = ""
    metrics: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def check_probes(folder: str, probes: Probes | None = None) -> list[Checked]:
    """Every probe of a folder. Raises SourceUnavailable if the folder itself cannot be used."""
    with_kernel = probes or Probes()
    taken: dict[tuple[str, str], str] = {}
    found = scan_folder(folder)
    if not found:
        raise SourceUnavailable(f"no probe lies in {folder}", "write NAME.toml and NAME.c")
    return [_check(os.path.abspath(os.path.expanduser(folder)), one, with_kernel, taken) for one in found]


def _check(folder: str, found: Found, probes: Probes, taken: dict[tuple[str, str], str]) -> Checked:
    checked = Checked(found.name, found.file)
    try:
        spec = read_spec(found)
        checked.description = spec.description
        checked.metrics = [f"{kind}.{metric}" for kind, metric in claims(spec)]
        for claim in claims(spec):
            if taken.setdefault(claim, found.file) != found.file:
                what = f"{claim[0]} has {claim[1]} from {taken[claim]} already"
                raise ProbeMistake(found.file, 0, what, "rename one")
        _check_places(found, spec, checked)
        if found.code.endswith(".c"):
            checked.warnings += check_source(folder, found, spec, probes)
        load_user_probe(folder, found, spec, probes).close()
    except ProbeMistake as error:
        checked.mistakes.append(str(error))
    except SourceUnavailable as error:
        if error.reason.startswith("the kernel refuses"):
            checked.mistakes.append(f"{found.code}: {error}")
        else:
            checked.unchecked.append(str(error))
    return checked


def _check_places(found: Found, spec: Spec, checked: Checked) -> None:
    lines = TomlLines(found.toml)
    for number, attach in enumerate(spec.attach):
        kind, _ = attach.target
        if kind not in ("uprobe", "uretprobe"):
            continue
        if attach.everywhere:
            if not (looked := sweep(attach.place)).files:
                line = lines.of(("attach", number, kind))
                what = f"no process has {attach.target[1]} in memory now"
                checked.warnings.append(str(ProbeMistake(found.file, line, what, f"{looked.without} files lack it")))
            continue
        try:
            find_place(attach.place, attach.pid)
        except NoPlace as error:
            mistake = str(ProbeMistake(found.file, lines.of(("attach", number, kind)), str(error), error.hint))
            (checked.warnings if attach.optional else checked.mistakes).append(mistake)
