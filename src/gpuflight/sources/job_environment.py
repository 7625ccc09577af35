"""Which rank of which job a process is, by the variables that launchers set in its environment.

torchrun, and what imitates it (RANK, WORLD_SIZE …), comes first: under Slurm or MPI it is started once per host, and
its workers inherit the variables of that. Only these few variables are looked at; environments hold secrets.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from gpuflight.redaction import redact_text

_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104 - an address to recognise, not to bind
_NO_RUN_ID = ("", "none", "default")
"""torchrun's run id where none was given."""
_NO_JOB = "nothing in its environment names the job"
_NO_SIZE = "nothing in its environment says how many ranks there are"
_MOST_CHARS = 256


class Launcher(Struct, frozen=True):
    """The variables of one launcher; the first that is set of each."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    job: tuple[str, ...] = ()
    step: tuple[str, ...] = ()
    """What tells several jobs of the same number apart."""


LAUNCHERS = (
    Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("TORCHELASTIC_RUN_ID",)),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    ),
    Launcher(
        "MPI",
        ("PMI_RANK", "PALS_RANKID"),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        ("PMI_JOBID", "PALS_APID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
    ),
    Launcher("Flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), ("FLUX_JOB_ID",)),
    Launcher(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_JOB_ID", "SLURM_JOBID"),
        ("SLURM_STEP_ID", "SLURM_STEPID"),
    ),
    Launcher("Kubernetes", ("JOB_COMPLETION_INDEX",), (), ()),
)
"""The first whose rank is set counts. Sources: torch.distributed.run, the manuals of Open MPI, MVAPICH2, Intel MPI,
Cray PALS and Flux, srun(1), Kubernetes' indexed jobs."""


FACTS = ("rank", "world_size", "local_rank", "job", "job_launcher")
"""Names of what is told."""


class JobFacts(Struct, frozen=True):
    """Attributes ``rank``, ``world_size``, ``local_rank``, ``job`` and ``job_launcher``, and why some are missing."""

    attributes: dict[str, str | int] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


NOTHING = JobFacts()


def job_facts(environ: Mapping[str, str], hostname: str) -> JobFacts:
    """What an environment says; ``NOTHING`` if that of no launcher. ``hostname``: of this host."""
    for launcher in LAUNCHERS:
        text = _first(environ, launcher.rank)
        if text:
            return _facts(launcher, text, environ, hostname)
    return NOTHING


def _facts(launcher: Launcher, text: str, environ: Mapping[str, str], hostname: str) -> JobFacts:
    rank, size = _number(text), _number(_first(environ, launcher.world_size))
    if rank is None or (size is not None and rank >= size):
        return JobFacts({}, {"rank": f"{launcher.name} says that it is rank {text[:16]!r}, which is none"})
    attributes: dict[str, str | int] = {"rank": rank, "job_launcher": launcher.name}
    unknown: dict[str, str] = {}
    if size is None:
        unknown["world_size"] = _NO_SIZE
    else:
        attributes["world_size"] = size
    local = _number(_first(environ, launcher.local_rank))
    if local is not None:
        attributes["local_rank"] = local
    job = redact_text(_job(launcher, environ, hostname))[:_MOST_CHARS]
    if job:
        attributes["job"] = job
    else:
        unknown["job"] = _NO_JOB
    return JobFacts(attributes, unknown)


def _job(launcher: Launcher, environ: Mapping[str, str], hostname: str) -> str:
    """The same text in all ranks of a job, whatever host they are on, and in no other job."""
    if launcher.name == "Kubernetes":  # the pod is called JOB-INDEX, and its host name is that
        pod, _, index = environ.get("HOSTNAME", "").rpartition("-")
        return f"Kubernetes {pod}" if pod and index == environ["JOB_COMPLETION_INDEX"] else ""
    named = _first(environ, launcher.job)
    if launcher.name == "torchrun":
        named = "" if named in _NO_RUN_ID else named
        address = environ.get("MASTER_ADDR", "").strip()
        if address:
            where = f"{address}:{environ.get('MASTER_PORT', '')}".removesuffix(":")
            if address.startswith(_LOOPBACK):
                where = f"{where} of {hostname}"  # every host has such an address
            named = f"{named} at {where}" if named else where
    step = _first(environ, launcher.step)
    return f"{launcher.name} {named}{'.' if step else ''}{step}" if named else ""


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := environ.get(name, "").strip())), "")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
