"""Compare groups of engines by scenario with one mixed pool (P/D-Serve).

    python -m benchmarks.scenario_groups

Requests of several scenarios, each with a long beginning of its own, go to embedded engines that
can cache only a few contexts. The same engines serve them as a mixed pool, as a mixed pool with
prefill and decode engines, and as groups by scenario. How many context tokens each layout computes
is counted. The requests per second, and the mean times to the first token (TTFT), are given as
ratios to the mixed pool in the same round, because times vary with what else the machine does. A
last line has the time of one cache transfer.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.tables import CONSOLE, columns, ratios, rotated, row, spread, write
from unstale.config import SHIPPED_POLICY
from unstale.engines import SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import EnginePool
from unstale.engines.registry import EngineOptions
from unstale.engines.routing import Phases
from unstale.model.policy import Policy

ENGINES = 4
LAYOUTS = {
    "mixed": Phases(),
    "mixed, 2 prefill": Phases(2, 1.0, sends_cache=True),
    "by scenario": Phases(scenarios="task_set"),
    "by scenario, 2 prefill": Phases(2, 1.0, sends_cache=True, scenarios="task_set"),
    "by scenario, 2 prefill at first": Phases(
        2, 1.0, sends_cache=True, scenarios="task_set", moves=True
    ),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a round: for each, its scenario and its context."""

    requests: Sequence[tuple[str, Sequence[int]]]
    reply: int

    @classmethod
    def make(cls, options: argparse.Namespace) -> "Traffic":
        numbers = np.random.default_rng(0)
        beginnings = numbers.integers(5, 200, (options.scenarios, options.beginning))
        requests = []
        for scenario in numbers.permutation(np.arange(options.requests) % options.scenarios):
            rest = numbers.integers(5, 200, options.rest)
            requests.append((str(scenario), [*beginnings[scenario].tolist(), *rest.tolist()]))
        return cls(requests, options.reply)

    @property
    def tokens(self) -> int:
        return sum(len(context) for _, context in self.requests)


@dataclass(frozen=True, slots=True)
class Served:
    """What a layout did with the traffic of one round."""

    seconds: float
    computed: float
    """Context tokens that some engine computed."""
    received: float
    rejects: float
    forwards: float
    first_token_s: float


async def serve(pool: EnginePool, traffic: Traffic, clients: int) -> Served:
    """Send all requests, `clients` at once."""
    places = asyncio.Semaphore(clients)

    async def ask(number: int, scenario: str, context: Sequence[int]) -> None:
        async with places:
            params = SamplingParams(traffic.reply, (), seed=number, scenario=scenario)
            await pool.sample(context, params)

    pool.metrics()
    began = time.perf_counter()
    await asyncio.gather(*(ask(n, *request) for n, request in enumerate(traffic.requests)))
    seconds = time.perf_counter() - began
    counted = pool.metrics()
    return Served(
        seconds,
        counted["prefill_tokens"],
        counted["received_tokens"],
        counted.get("rejects", 0.0),
        counted.get("forwards", 0.0),
        counted["first_token_s"],
    )


async def compare(options: argparse.Namespace) -> list[str]:
    traffic = Traffic.make(options)
    policy = Policy.load(SHIPPED_POLICY, dtype="float32", device="cpu", trained=False)
    settings = EngineOptions(
        SHIPPED_POLICY,
        dtype="float32",
        max_running=options.slots,
        max_context=1024,
        cache_key="0" * 64,
    )
    engines = [EmbeddedEngine(settings) for _ in range(ENGINES)]
    served: dict[str, list[Served]] = {name: [] for name in LAYOUTS}
    pools = {
        name: EnginePool(engines, max_running=options.slots, phases=phases)
        for name, phases in LAYOUTS.items()
    }
    try:
        for turn in range(options.repeats):
            for name in rotated(list(LAYOUTS), turn % len(LAYOUTS)):
                pool = pools[name]
                await pool.start()
                for version in range(options.versions):
                    await pool.interrupt()
                    await pool.load(policy.weights(), version)
                    await pool.resume()
                    found = await serve(pool, traffic, options.clients)
                served[name].append(found)  # of the last version
                CONSOLE.print(f"round {turn + 1} of {options.repeats}: {name}: {found}")
        transfer = await time_transfer(engines, policy, traffic)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    return [*table(served, traffic), "", transfer]


def table(served: dict[str, list[Served]], traffic: Traffic) -> list[str]:
    rates = {name: [1 / each.seconds for each in rounds] for name, rounds in served.items()}
    firsts = {name: [each.first_token_s for each in rounds] for name, rounds in served.items()}
    lines = columns(
        "engines",
        "context tokens computed",
        "received",
        "rejects",
        "forwards",
        "requests/s",
        "TTFT",
    )
    for name, rounds in served.items():
        computed = median(each.computed for each in rounds)
        lines.append(
            row(
                name,
                f"{computed:,.0f} of {traffic.tokens:,} ({computed / traffic.tokens:.0%})",
                f"{median(each.received for each in rounds):,.0f}",
                f"{median(each.rejects for each in rounds):.0f}",
                f"{median(each.forwards for each in rounds):.0f}",
                f"{spread(ratios(rates, name, 'mixed'))}",
                f"{spread(ratios(firsts, name, 'mixed'))}",
            )
        )
    return lines


async def time_transfer(engines: Sequence[EmbeddedEngine], policy: Policy, traffic: Traffic) -> str:
    """Compare the time of sending the cache of a context with that of computing the context."""
    source, target, *_ = engines
    sent, computed = [], []
    context = traffic.requests[0][1]
    for version in range(100, 107):
        for engine in (source, target):
            await engine.interrupt()
            await engine.load(policy.weights(), version)
            await engine.resume()
        began = time.perf_counter()
        await source.sample(context, SamplingParams(1, ()))
        computed.append(time.perf_counter() - began)
        began = time.perf_counter()
        stored = await source.send_cache(context, await target.cache_address(context))
        sent.append(time.perf_counter() - began)
        assert stored == len(context)
    share = median(one / other for one, other in zip(sent, computed, strict=True))
    return (
        f"Sending the cache of {len(context)} tokens takes {share:.2f} of the time of computing "
        f"them (median of {len(sent)})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenario_groups")
    for name, value, text in (
        ("requests", 128, "requests in a round"),
        ("scenarios", 4, "scenarios"),
        ("beginning", 512, "tokens with which all contexts of a scenario begin"),
        ("rest", 64, "further tokens of a context"),
        ("reply", 16, "tokens of a reply"),
        ("clients", 16, "requests at the same time"),
        ("slots", 12, "contexts that an engine can cache"),
        ("versions", 2, "versions of the weights; the last one is measured"),
        ("repeats", 3, "rounds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    options = parser.parse_args()
    write("scenario-groups", "Groups of engines by scenario", asyncio.run(compare(options)))


if __name__ == "__main__":
    main()
