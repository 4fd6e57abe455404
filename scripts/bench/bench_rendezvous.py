#!/usr/bin/env python3
"""Time meetings of islands that are jobs, of one rank each, at a rendezvous on this machine.

    python scripts/bench/bench_rendezvous.py --islands 2 4 --mbytes 16 64

Islands put a message each, then take those of the others, all at once. A row has the seconds of
both, for the slowest island, the best of `--repeats`; what went into and out of the store a
second; the store's CPU a MB, which tells the most that one store can do whatever else the machine
is busy with; and requests that an island waits for, each a round trip of the link or two. The first
line has what one socket carries between two threads here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybridcomp.job.waits import awaited
from hybridcomp.sync.rendezvous import Rendezvous
from hybridcomp.sync.store_line import StoreLine

LIMIT_S = 300.0
Row = dict[str, float]


class CountedLine(StoreLine):
    """A line that counts its requests; ``set`` waits for no answer."""

    requests = 0

    def _ask(self, work: Any) -> Any:
        self.requests += 1
        return super()._ask(work)

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``, uncounted."""
        super().set(key, value)
        self.requests -= 1


def serve(pipe: Any) -> None:
    """Hold a store, and say on which port and with which CPU seconds, whenever asked."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(time.process_time())


def meet(port: int, me: int, islands: int, nbytes: int, repeats: int, pipe: Any) -> None:
    """Hold meetings as one island; sends seconds of both halves and requests, best first."""
    line = CountedLine("127.0.0.1", port, request_s=LIMIT_S)
    rendezvous = Rendezvous(line, 0, islands, LIMIT_S, LIMIT_S)
    message, found = os.urandom(nbytes), []

    def together(what: str) -> None:
        line.add(what, 1)
        awaited(lambda: line.add(what, 0) >= islands or None, LIMIT_S)

    for number in range(repeats):
        together(f"{islands}/{nbytes}/put/{number}")
        began = time.perf_counter()
        rendezvous.post(f"{islands}/{nbytes}/{me}", number, message)
        put_s = time.perf_counter() - began
        together(f"{islands}/{nbytes}/take/{number}")
        began, before = time.perf_counter(), line.requests
        for other in range(islands):
            if other != me:
                got = rendezvous.message_of(f"{islands}/{nbytes}/{other}", number)
                assert got is not None and len(got) == nbytes
        found.append((put_s, time.perf_counter() - began, line.requests - before))
    together(f"{islands}/{nbytes}/end")
    for number in range(2):
        rendezvous.withdraw(f"{islands}/{nbytes}/{me}", number)
    pipe.send(found)


def measured(context: Any, port: int, store: Any, islands: int, mbytes: int, repeats: int) -> Row:
    """Return the row of so many islands that send so many MB each."""
    pipes = []
    store.send(True)
    before = store.recv()
    for me in range(islands):
        here, there = context.Pipe()
        args = (port, me, islands, mbytes * 10**6, repeats, there)
        context.Process(target=meet, args=args, daemon=True).start()
        pipes.append(here)
    every = [pipe.recv() for pipe in pipes]
    store.send(True)
    cpu_s = store.recv() - before
    put_s = min(max(one[number][0] for one in every) for number in range(repeats))
    take_s = min(max(one[number][1] for one in every) for number in range(repeats))
    into, out = islands * mbytes, islands * (islands - 1) * mbytes
    return {
        "put, s": put_s,
        "take, s": take_s,
        "in, MB/s": into / put_s,
        "out, MB/s": out / take_s,
        "store's CPU, ms/MB": 1e3 * cpu_s / repeats / (into + out),
        "requests": float(every[0][-1][2]),
    }


def socket_speed(nbytes: int = 256 << 20) -> float:
    """Return MB/s of one pair of sockets, from one thread to another."""
    one, two = socket.socketpair()
    chunk = memoryview(bytearray(4 << 20))

    def send() -> None:
        for _ in range(nbytes // len(chunk)):
            one.sendall(chunk)
        one.close()

    began = time.perf_counter()
    thread = threading.Thread(target=send)
    thread.start()
    room = bytearray(4 << 20)
    while two.recv_into(room):
        pass
    thread.join()
    two.close()
    return nbytes / 1e6 / (time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--mbytes", type=int, nargs="+", default=[16, 64], metavar="MB")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(argv)
    if min(args.islands) < 2:
        parser.error(f"--islands: found {min(args.islands)}; expected 2 or more")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "hybridcomp.sync.rendezvous"])
    store, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    port = store.recv()
    rows: dict[str, Row] = {}
    print(f"one socket: {socket_speed():.0f} MB/s", flush=True)
    for islands in args.islands:
        for mbytes in args.mbytes:
            row = measured(context, port, store, islands, mbytes, args.repeats)
            rows[f"{islands} x {mbytes} MB"] = row
            shown = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
            print(f"{islands} islands, {mbytes} MB each: {shown}", flush=True)
    store.send(False)
    server.join()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
