"""Cases of the rules about gpuflight's own losses."""

from tests.rule_scenes import Case, steady

from gpuflight.graph import nodes
from gpuflight.rounds import Coverage

_HOST = nodes.Host(hostname="h")


def _lines(lost: int) -> list[Coverage]:
    return [Coverage(collector="cuda_probes", status="ok", losses={"dropped events": lost} if lost else {})]


CASES = {
    "records_dropped": Case(
        fires=steady(_HOST, coverage=_lines(120)),
        clear=steady(_HOST, coverage=_lines(0)),
        unknown=None,
        never_unknown="every round has coverage lines",
    )
}
