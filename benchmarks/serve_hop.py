"""The hop through Ray Serve's proxy: the same echo behind Serve, and on a listener of its own (ADR 37).

    python benchmarks/serve_hop.py [--quick] [--json]

One replica of one Serve deployment; beside it FastAPI on uvicorn, in a process of its own. Nothing of RayQueue runs.
A request is a POST of 100 records of 100 B, its answer as long as the gateway's; neither looks at it.

``p50``, ``p99``  one caller: from the request to its answer
``per_s``         requests of 64 callers

HTTP only: Serve 2.60's gRPC proxy listens on all interfaces, whatever it is told, and this runs on loopback.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks import gateway
from benchmarks._bench import Bench, parser, percentile
from rayqueue.client.embedded import embedded_ray


class Echo:
    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    async def __call__(self, request: Request) -> Response:
        await request.body()
        return Response(self._answer, media_type="application/json")


def deployed() -> Any:
    """Ray's decorator is not typed."""
    deployment: Any = serve.deployment(num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    return deployment(Echo).bind(gateway.http_answer(gateway.REST_BATCH))


def measure(bench: Bench, who: str, port: int, path: str, seconds: float) -> None:
    body = gateway.batch(gateway.REST_BATCH)
    gateway.rest_rate(port, path, body, 1.0)
    took_ms = gateway.rest_latency(port, path, body, int(seconds * 50))
    rate = gateway.rest_rate(port, path, body, seconds)
    bench.add(
        **{f"{who}_p50_ms": percentile(took_ms, 50), f"{who}_p99_ms": percentile(took_ms, 99), f"{who}_per_s": rate}
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def main() -> None:
    bench = Bench("serve_hop", parser(__doc__ or "").parse_args())
    seconds = 4.0 if bench.quick else 20.0
    with bench.progress(2) as steps, embedded_ray():
        steps.next("uvicorn")
        process, port = gateway.started(gateway.serve_http_echo)
        try:
            measure(bench, "uvicorn", port, "/echo", seconds)
        finally:
            process.terminate()
        steps.next("Serve")
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            serve.run(deployed(), route_prefix="/echo")
            measure(bench, "serve", port, "/echo", seconds)
        finally:
            stop: Any = serve.shutdown
            stop()
    figures = bench.figures
    bench.add(hop_p50_ms=figures["serve_p50_ms"] - figures["uvicorn_p50_ms"])
    bench.table("A hop through Serve", ("", ""), list(bench.figures.items()))
    bench.finish()


if __name__ == "__main__":
    main()
