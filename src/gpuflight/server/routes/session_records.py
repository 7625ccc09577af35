"""Questions about the records of one session: kernels, copies, waits, memory, scopes, profile, telemetry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request
from starlette.responses import Response

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.events.answers import answer
from gpuflight.server.events.parameters import (
    Device,
    From,
    Limit,
    Name,
    Number,
    Offset,
    Points,
    SessionId,
    To,
    time_ns,
)
from gpuflight.server.events.samples import SESSION
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample

ROOT = "/api/v1/sessions/{session_id}"
router = PlainRouter(prefix=ROOT, tags=["sessions"], dependencies=[Depends(require(Role.VIEWER))])

_SAMPLES = f"/api/v1/sessions/{SESSION}"


class Only:
    """Which kernels: the parameters that all questions about kernels have."""

    def __init__(
        self,
        name: Name = None,
        kernel_id: Number = None,
        stream: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="id of a stream")] = None,
        device: Device = None,
        corr_id: Number = None,
        scope: Annotated[
            str | None, Query(max_length=4096, description="a user scope, `global|outer`; what is inside counts too")
        ] = None,
        first: From = None,
        last: To = None,
    ) -> None:
        self.parameters = {
            "name_contains": name,
            "kernel_id": kernel_id,
            "stream_id": stream,
            "device_id": device,
            "corr_id": corr_id,
            "scope": scope,
            "from_ns": time_ns(first),
            "to_ns": time_ns(last),
        }

    def filter(self) -> Any:
        """As the query takes it."""
        from gpuflight.events.query.kernels import KernelFilter

        return KernelFilter(**self.parameters)  # type: ignore[arg-type]


OnlyThose = Annotated[Only, Depends(Only)]


@router.get(
    "/kernels/top",
    summary="Kernels by name: the longest in all first",
    openapi_extra=sample("GET", f"{_SAMPLES}/kernels/top?order=p99_ns&limit=10"),
)
async def top(
    request: Request,
    state: State,
    session_id: SessionId,
    only: OnlyThose,
    order: Annotated[
        Literal["total_ns", "count", "mean_ns", "max_ns", "p99_ns"], Query(description="what is greatest comes first")
    ] = "total_ns",
    by: Annotated[
        Literal["stream_id", "device_id", "scope_id"] | None,
        Query(description="a line per kernel and stream, device or user scope"),
    ] = None,
    quantiles: Annotated[bool, Query(description="median and p99 too")] = False,
    limit: Limit = 20,
    offset: Offset = 0,
) -> Response:
    """Launches, total, mean, least and greatest duration, share of the time of all kernels that match."""
    from gpuflight.events.query.kernels import top_kernels

    return await answer(
        request,
        state,
        session_id,
        lambda reader: top_kernels(
            reader, order=order, only=only.filter(), by=by, quantiles=quantiles, limit=limit, offset=offset
        ),
    )


@router.get(
    "/kernels", summary="Launches of kernels, one by one", openapi_extra=sample("GET", f"{_SAMPLES}/kernels?limit=100")
)
async def kernels(
    request: Request,
    state: State,
    session_id: SessionId,
    only: OnlyThose,
    longest_first: Annotated[bool, Query(description="the longest first, else in order of time")] = False,
    limit: Limit = 100,
    offset: Offset = 0,
) -> Response:
    """With what is known of each: grid, block, registers, shared memory, occupancy and what limits it, scope, stack."""
    from gpuflight.events.query.kernels import launches

    return await answer(
        request,
        state,
        session_id,
        lambda reader: {
            "kernels": launches(reader, only=only.filter(), longest_first=longest_first, limit=limit, offset=offset)
        },
    )


@router.get(
    "/kernels/histogram",
    summary="How durations of kernels spread",
    openapi_extra=sample("GET", f"{_SAMPLES}/kernels/histogram"),
)
async def histogram(
    request: Request,
    state: State,
    session_id: SessionId,
    only: OnlyThose,
    per_octave: Annotated[int, Query(ge=1, le=16, description="buckets from a power of two to the next")] = 4,
) -> Response:
    """Buckets of durations (ns) with their launches and total time; empty ones are left out."""
    from gpuflight.events.query.kernels import duration_histogram

    return await answer(
        request,
        state,
        session_id,
        lambda reader: {"buckets": duration_histogram(reader, only=only.filter(), per_octave=per_octave)},
    )


@router.get("/copies", summary="Copies of memory", openapi_extra=sample("GET", f"{_SAMPLES}/copies?by_size=true"))
async def copies_of(
    request: Request,
    state: State,
    session_id: SessionId,
    by_size: Annotated[bool, Query(description="by class of size too")] = False,
    first: From = None,
    last: To = None,
) -> Response:
    """By direction: how many, bytes, time, bytes per second in all and of the fastest."""
    from gpuflight.events.query.copies import copies

    from_ns, to_ns = time_ns(first), time_ns(last)
    return await answer(
        request,
        state,
        session_id,
        lambda reader: {"copies": copies(reader, by_size=by_size, from_ns=from_ns, to_ns=to_ns)},
    )


@router.get("/memset", summary="Fills of memory", openapi_extra=sample("GET", f"{_SAMPLES}/memset"))
async def fills_of(
    request: Request,
    state: State,
    session_id: SessionId,
    first: From = None,
    last: To = None,
    limit: Limit = 1000,
) -> Response:
    """By device and stream."""
    from gpuflight.events.query.copies import fills

    from_ns, to_ns = time_ns(first), time_ns(last)
    return await answer(
        request,
        state,
        session_id,
        lambda reader: {"fills": fills(reader, from_ns=from_ns, to_ns=to_ns, limit=limit)},
    )


@router.get("/waits", summary="Waits of the host for the GPU", openapi_extra=sample("GET", f"{_SAMPLES}/waits"))
async def waits_of(
    request: Request,
    state: State,
    session_id: SessionId,
    by_place: Annotated[bool, Query(description="by place in the program too")] = True,
    first: From = None,
    last: To = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> Response:
    """By kind and place, with their share of the session's time."""
    from gpuflight.events.query.waits import waits

    from_ns, to_ns = time_ns(first), time_ns(last)
    return await answer(
        request,
        state,
        session_id,
        lambda reader: {
            "waits": waits(reader, by_place=by_place, from_ns=from_ns, to_ns=to_ns, limit=limit, offset=offset)
        },
    )


@router.get("/memory", summary="Memory taken", openapi_extra=sample("GET", f"{_SAMPLES}/memory"))
async def memory(request: Request, state: State, session_id: SessionId) -> Response:
    """By kind and device: allocations, frees, the most at once and when, what is held at the end."""
    from gpuflight.events.query.allocations import memory_use

    return await answer(request, state, session_id, lambda reader: {"memory": memory_use(reader)})


@router.get(
    "/memory/held", summary="Memory never given back", openapi_extra=sample("GET", f"{_SAMPLES}/memory/held?limit=10")
)
async def memory_held(
    request: Request, state: State, session_id: SessionId, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """The largest first, with scope and stack; leaks, if the program ended in order."""
    from gpuflight.events.query.allocations import held

    return await answer(request, state, session_id, lambda reader: {"held": held(reader, limit=limit, offset=offset)})


@router.get(
    "/memory/series", summary="Device memory over time", openapi_extra=sample("GET", f"{_SAMPLES}/memory/series")
)
async def memory_over_time(
    request: Request, state: State, session_id: SessionId, device: Device = None, points: Points = 500
) -> Response:
    """Bytes in use, the most of each step."""
    from gpuflight.events.query.allocations import memory_series

    return await answer(
        request,
        state,
        session_id,
        lambda reader: {"points": memory_series(reader, device_id=device, points=points)},
    )


@router.get("/scopes", summary="Scopes of the program, as a tree", openapi_extra=sample("GET", f"{_SAMPLES}/scopes"))
async def scopes(request: Request, state: State, session_id: SessionId) -> Response:
    """Times with inner scopes included and excluded, kernels launched in each."""
    from gpuflight.events.query.scopes import scope_tree

    return await answer(request, state, session_id, scope_tree)


@router.get("/profile", summary="Stalls and SASS metrics", openapi_extra=sample("GET", f"{_SAMPLES}/profile?per=line"))
async def profile_of(
    request: Request,
    state: State,
    session_id: SessionId,
    kind: Annotated[Literal["pc_sampling", "sass_metric"], Query(description="what was sampled")] = "pc_sampling",
    per: Annotated[Literal["function", "line", "instruction"], Query(description="a line for each")] = "function",
    function: Annotated[str | None, Query(max_length=4096, description="a part of the function's name")] = None,
    limit: Limit = 200,
    offset: Offset = 0,
) -> Response:
    """Per function, line or instruction, the greatest first."""
    from gpuflight.events.query.profile import profile

    return await answer(
        request,
        state,
        session_id,
        lambda reader: {
            "lines": profile(reader, kind=kind, per=per, function_contains=function, limit=limit, offset=offset)
        },
    )


@router.get(
    "/telemetry",
    summary="Readings of devices and host over time",
    openapi_extra=sample("GET", f"{_SAMPLES}/telemetry?of=host&points=100"),
)
async def telemetry_of(
    request: Request,
    state: State,
    session_id: SessionId,
    of: Annotated[Literal["device", "host"], Query(description="whose")] = "device",
    metric: Annotated[list[str] | None, Query(max_length=32, description="name; may be given again")] = None,
    device: Device = None,
    first: From = None,
    last: To = None,
    points: Points = 500,
) -> Response:
    """Mean, least and greatest of each step, by metric and device."""
    from gpuflight.events.query.series import telemetry

    from_ns, to_ns = time_ns(first), time_ns(last)
    return await answer(
        request,
        state,
        session_id,
        lambda reader: {
            "series": telemetry(
                reader,
                "host_metric" if of == "host" else "device_metric",
                metrics=metric,
                device_id=device,
                from_ns=from_ns,
                to_ns=to_ns,
                points=points,
            )
        },
    )


@router.get(
    "/counters", summary="Hardware counters over time", openapi_extra=sample("GET", f"{_SAMPLES}/counters?points=100")
)
async def counters(
    request: Request,
    state: State,
    session_id: SessionId,
    device: Device = None,
    first: From = None,
    last: To = None,
    points: Points = 500,
) -> Response:
    """Of PM sampling: mean, least and greatest of each step, by counter and device."""
    from gpuflight.events.query.series import hardware_counters

    from_ns, to_ns = time_ns(first), time_ns(last)
    return await answer(
        request,
        state,
        session_id,
        lambda reader: {
            "series": hardware_counters(reader, device_id=device, from_ns=from_ns, to_ns=to_ns, points=points)
        },
    )
