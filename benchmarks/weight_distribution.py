"""How fast do weights get from one host to all readers on many hosts?

Each host is a set of network namespaces with a link of its own, whose bandwidth is limited in both directions (`tc
tbf`). One process publishes; on each other host several processes fetch every version into their own memory, at once.
The peer, measured in turns with it in the same run, is `distribution=direct`: every reader gets the version from its
publisher. A fetch checks every byte on both sides (`verify="cheap"` of whole tensors). The goal is a speed-up of 0.8
times the readers of a host. Needs root, and the packages iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from harness.report import machine, table, verdict
from harness.throughput import quartiles
from networks import Network, why_no_hosts
from store_nodes import Nodes

MIB = 1 << 20
SIDES = ("auto", "direct")
GOAL = 0.8
"""Times the readers of a host."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    hosts: tuple[int, ...]
    readers: tuple[int, ...]
    mib_of_link: dict[int, int]
    """For each link, in Mbit/s, the size of a version."""
    num_rounds: int


FULL = Plan(hosts=(2, 4, 8), readers=(2, 4), mib_of_link={1000: 64, 10_000: 128}, num_rounds=3)
QUICK = Plan(hosts=(2,), readers=(2,), mib_of_link={200: 4}, num_rounds=1)


class Field:
    """One publisher, and as many readers on each of the other hosts."""

    def __init__(self, network: Network, nodes: Nodes, num_readers: int) -> None:
        self.network = network
        home, *others = network.hosts
        self.root = nodes.start(home, bind=home.address)
        env = self.root.finish()
        self.readers = [nodes.start(host, env=env) for host in others for _ in range(num_readers)]
        self._num_versions = 0

    def cpu_s(self) -> float:
        return sum(node.run("cpu") for node in (self.root, *self.readers))

    def fetch(self, side: str, num_bytes: int) -> dict[str, Any]:
        """Publish a version and have all readers fetch it; return how long that took, and what it cost."""
        self.root.run("distribute", side)
        self._num_versions += 1
        digest = self.root.run("publish", self._num_versions, num_bytes)
        before, spent_s = [host.traffic() for host in self.network.hosts], self.cpu_s()
        for reader in self.readers:
            reader.start("time_fetch", num_bytes, digest)
        found = [reader.finish() for reader in self.readers]
        after, spent_s = [host.traffic() for host in self.network.hosts], self.cpu_s() - spent_s
        received = [(b.received - a.received) / num_bytes for a, b in zip(before, after, strict=True)]
        return {
            "seconds": max(each["ended"] for each in found) - min(each["began"] for each in found),
            "fetch_s": statistics.median(each["ended"] - each["began"] for each in found),
            "cpu_s": spent_s,
            "sent": (after[0].sent - before[0].sent) / num_bytes,
            "received": statistics.mean(received[1:]),
            "load": os.getloadavg()[0],
        }


@contextmanager
def opened(num_hosts: int, num_readers: int) -> Iterator[Field]:
    with tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as nodes, Network(1 + num_hosts) as network:
        yield Field(network, nodes, num_readers)


def compare(field: Field, plan: Plan, mbit: int) -> dict[str, Any]:
    """Measure both sides in turns on links of this speed."""
    size = plan.mib_of_link[mbit] * MIB
    for host in field.network.hosts:
        field.network.limit(host, upload_mbit=mbit, download_mbit=mbit)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for side in SIDES:
        field.fetch(side, size)  # plans are made, memory is touched
    for number in range(plan.num_rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            found[side].append(field.fetch(side, size))
    ratios = [direct["seconds"] / ours["seconds"] for ours, direct in zip(found["auto"], found["direct"], strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_quartiles": quartiles(ratios), **found}


def measure(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for num_hosts in plan.hosts:
        for num_readers in plan.readers:
            with opened(num_hosts, num_readers) as field:
                for mbit in plan.mib_of_link:
                    row = compare(field, plan, mbit)
                    row |= {"hosts": num_hosts, "readers": num_readers, "mbit": mbit, "mib": plan.mib_of_link[mbit]}
                    row |= {"goal": GOAL * num_readers, "met": row["ratio"] >= GOAL * num_readers}
                    rows.append(row)
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def printed(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    head = (
        "hosts × readers, link, version", "relays, s", "direct, s", "ratio (quartiles)", "goal",
        "sent by the publisher, relays / direct", "received by a host", "CPU s, relays / direct",
    )  # fmt: skip

    def median(side: str, name: str, row: dict[str, Any]) -> float:
        return statistics.median(each[name] for each in row[side])

    return table(
        head,
        (
            (
                f"{row['hosts']} × {row['readers']}, {row['mbit'] / 1000:g} Gbit/s, {row['mib']} MiB",
                f"{median('auto', 'seconds', row):.2f}",
                f"{median('direct', 'seconds', row):.2f}",
                f"{row['ratio']:.1f} ({row['ratio_quartiles'][0]:.1f}–{row['ratio_quartiles'][2]:.1f})",
                verdict(row, "≥"),
                f"{median('auto', 'sent', row):.1f} / {median('direct', 'sent', row):.1f} versions",
                f"{median('auto', 'received', row):.2f} / {median('direct', 'received', row):.2f}",
                f"{median('auto', 'cpu_s', row):.1f} / {median('direct', 'cpu_s', row):.1f}",
            )
            for row in rows
        ),
    )


def chosen(args: argparse.Namespace) -> Plan:
    """Return the plan that the arguments ask for."""
    base = QUICK if args.quick else FULL
    links = base.mib_of_link
    if args.mbit:
        links = {mbit: args.mib or links.get(mbit, 64) for mbit in args.mbit}
    elif args.mib:
        links = dict.fromkeys(links, args.mib)
    hosts, readers = tuple(args.hosts or base.hosts), tuple(args.readers or base.readers)
    return Plan(hosts=hosts, readers=readers, mib_of_link=links, num_rounds=args.rounds or base.num_rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run; figures mean little")
    parser.add_argument(
        "--hosts", type=int, nargs="+", help="numbers of hosts with readers, at most 7 beside the publisher's"
    )
    parser.add_argument("--readers", type=int, nargs="+", help="numbers of readers on each of them")
    parser.add_argument("--mbit", type=int, nargs="+", help="bandwidths of a link, each way")
    parser.add_argument("--mib", type=int, help="size of a version")
    parser.add_argument("--rounds", type=int, help="how often each side is measured")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args()
    if reason := why_no_hosts():
        print(f"a test network is not possible here: {reason}", file=sys.stderr)
        return 2
    found = {"machine": machine(), "rows": measure(chosen(args))}
    print(printed(found["rows"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    missed = [row for row in found["rows"] if not row["met"]]
    print(f"\ngoals missed: {len(missed)} of {len(found['rows'])}" if missed else "\nevery goal measured was met")
    return int(bool(missed) and args.check)


if __name__ == "__main__":
    sys.exit(main())
