"""Plays traces of requests over simulated replicas, placed by the routers that are installed."""

from __future__ import annotations

from typing import Any

from lines import serve

from conch.api import EngineConfig
from conch.engine.catalogue import Catalogue
from conch.testing import replica_traces as traces
from conch.testing.replicas import play

TRACES = {
    "equal": traces.equal,
    "every_fourth_long": traces.every_fourth_long,
    "burst_after_idling": traces.burst_after_idling,
    "shared_prompts": traces.shared_prompts,
}


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Load the routers."""
    catalogue = Catalogue.load()

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        """Play one trace with one router."""
        router = catalogue.build("router", asked["router"], EngineConfig(model="none"))
        report = play(router, TRACES[asked["trace"]](), asked["replicas"])
        return {
            "placed": report.placed,
            "imbalance": round(report.imbalance, 4),
            "most_waiting_beside_idle": report.most_waiting_beside_idle,
            "hit_rate": round(report.hit_rate, 4),
        }

    return {"routers": catalogue.names("router")}, answer


if __name__ == "__main__":
    serve(start)
