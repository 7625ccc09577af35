"""Cases of the rules about how GPUs reach each other and the network."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, steady
from tests.unit.rule_cases.gpu import ID, gpu
from tests.unit.rule_cases.host import process, uses

from gpuflight.graph import edges, nodes

_NEAR, _FAR = nodes.RdmaDevice(name="mlx5_0"), nodes.RdmaDevice(name="mlx5_7")


def _rank(card: nodes.RdmaDevice, *, placed: bool = True) -> list[Any]:
    one = process()
    found: list[Any] = [gpu(), one, uses(one), _NEAR, _FAR, edges.Access(one.id, card.id)]
    if placed:
        found.append(edges.Proximity(ID, _NEAR.id, {"distance": "PIX"}))
        found.append(edges.Proximity(ID, _FAR.id, {"distance": "SYS"}))
    return found


def _pair(distance: str = "NV18", **p2p: str) -> list[Any]:
    other = nodes.GPU(uuid="GPU-9", attributes={"index": 9})
    facts = {"distance": distance, **p2p}
    return [gpu(), other, edges.Proximity(ID, other.id, facts)]


def _eight(fewer: int = 0, without: str = "") -> list[nodes.GPU]:
    def one(n: int) -> nodes.GPU:
        metrics = {} if without else {"nvlink_active_count": 18 - (fewer if n == 5 else 0)}
        unknown = {"nvlink_active_count": without} if without else None
        return nodes.GPU(uuid=f"U{n}", attributes={"index": n, "name": "H100"}, metrics=metrics, unknown=unknown)

    return [one(n) for n in range(8)]


CASES = {
    "nic_too_far": Case(
        fires=steady(*_rank(_FAR), seconds=35),
        about="RdmaDevice(mlx5_7)",
        clear=steady(*_rank(_NEAR), seconds=35),
        unknown=steady(*_rank(_FAR, placed=False), seconds=35),
    ),
    "no_p2p": Case(
        fires=steady(*_pair(p2p_read="chipset not supported", p2p_write="ok")),
        about=f"Proximity({ID}->GPU(uuid=GPU-9))",
        clear=steady(*_pair(p2p_read="ok", p2p_write="ok")),
        unknown=steady(*_pair()),
        also={"across sockets": ("clear", steady(*_pair("SYS", p2p_read="not supported", p2p_write="ok")))},
    ),
    "asymmetric_nvlink": Case(
        fires=steady(*_eight(fewer=2), seconds=35),
        about="GPU(uuid=U5)",
        clear=steady(*_eight(), seconds=35),
        unknown=steady(*_eight(without="no right"), seconds=35),
    ),
}
