"""Cases of the rules about CPU limits."""

from tests.rule_scenes import Case, steady

from gpuflight.graph import nodes


def _box(throttled: float | None, why: str = "", periods: int = 50) -> nodes.Container:
    metrics = {"cpu_quota_cores": 2.0, "enforcement_periods_count": periods} | (
        {"throttled_pct": throttled} if throttled is not None else {}
    )
    return nodes.Container(container_id="c1", metrics=metrics, unknown={"throttled_pct": why} if why else None)


CASES = {
    "cpu_throttled": Case(
        fires=steady(_box(61.0)),
        about="Container(c1)",
        severity="critical",
        clear=steady(_box(2.0)),
        unknown=steady(_box(None, "fewer than 10 periods")),
        also={
            "warn": ("warn", steady(_box(12.0))),
            "few periods": ("unknown", steady(_box(61.0, periods=7))),
            "wants no CPU": ("unknown", steady(_box(None, "no enforcement period passed", periods=0))),
        },
    )
}
