"""The lab: layouts, command lines, owners of namespaces; as root also a real lab."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

import netlab
from lab import namespaces, team
from lab.cluster import Lab
from lab.layout import (
    LabError,
    Layout,
    Rates,
    environment,
    fill,
    gso_nbytes,
    parse_rate,
    pinning,
    shaping,
    show_rate,
    wiring,
)
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("text", "switches", "ranks"),
    [("2", (2,), 1), ("2x3", (2,), 3), ("2+2", (2, 2), 1), ("1+2x4", (1, 2), 4)],
)
def test_layout_parses_and_shows(text: str, switches: tuple[int, ...], ranks: int) -> None:
    layout = Layout.parse(text)
    assert (layout.switches, layout.ranks) == (switches, ranks)
    assert layout.world_size == sum(switches) * ranks
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["", "0", "2x0", "x2", "2+", "2x2x2", "-1", "two", "201"])
def test_layout_refuses(text: str) -> None:
    with pytest.raises(LabError, match="layout: expected"):
        Layout.parse(text)


def test_rates() -> None:
    assert parse_rate("1gbit") == 10**9
    assert parse_rate("2.5Gbit") == 2_500_000_000
    assert parse_rate("8kbit") == 8000
    assert parse_rate("none") is None
    for rate in ("400mbit", "none", "2.5gbit"):
        assert show_rate(parse_rate(rate)) == rate
    for wrong in ("fast", "1", "0gbit", "1bit", "-1gbit"):
        with pytest.raises(LabError, match="rate: expected"):
            parse_rate(wrong)


@pytest.mark.parametrize("rate", [10**6, 10**8, 10**9, 25 * 10**9])
def test_a_packet_fits_into_the_bucket(rate: int) -> None:
    """tbf segments packets larger than its bucket; a large bucket lets extra bytes pass."""
    words = shaping("n", "eth0", rate)[1]
    burst = int(words[words.index("burst") + 1])
    limit = int(words[words.index("limit") + 1])
    assert burst >= 2 * gso_nbytes(rate)
    assert limit > burst
    # a port's buffer: 50 ms of a slow link hold only two packets, and others would be dropped
    assert limit - burst >= max(2_000_000, 0.05 * rate / 8 - 1)
    assert burst <= max(8192, rate * 1e-3 / 4)


def test_every_link_is_shaped_at_both_ends() -> None:
    layout = Layout.parse("2+1")
    rates = Rates(10**9, 10**8, {2: None})
    commands = wiring(layout, rates, "p-", 1500)
    shaped = {(c[2], c[c.index("dev") + 1]): c[c.index("rate") + 1] for c in commands if "tbf" in c}
    assert shaped == {
        **{("p-n0", "eth0"): "1000000000bit", ("p-sw", "p0"): "1000000000bit"},
        **{("p-n1", "eth0"): "1000000000bit", ("p-sw", "p1"): "1000000000bit"},
        **{("p-sw", f"{end}{s}"): "100000000bit" for end in ("up", "core") for s in (0, 1)},
    }
    masters = {c[5]: c[7] for c in commands if "master" in c}
    assert masters["p0"] == masters["p1"] == "br0"
    assert masters["p2"] == masters["up1"] == "br1" and masters["core1"] == "core"
    # one switch needs no core
    assert not any("core" in words for words in wiring(Layout.parse("3"), Rates(), "p-", 1500))


def test_links_get_other_rates_while_ranks_run(root: None) -> None:
    def queues(lab: Lab) -> list[str]:
        return [
            namespaces.command(["tc", "-n", name, "qdisc", "show", "dev", "eth0"])
            for name in lab.names
        ]

    with Lab(Layout.parse("1+1"), Rates(10**8)) as lab:
        assert all("tbf" in queue and "100Mbit" in queue for queue in queues(lab))
        for rates in (Rates(), Rates(10**9, uplink=10**7), Rates(10**8, nodes={1: None})):
            lab.shape(rates)
            shown = [re.search(r"rate (\S+)", queue) for queue in queues(lab)]
            found = [match and match[1] for match in shown]
            assert found == {
                None: [None, None], 10**9: ["1Gbit"] * 2, 10**8: ["100Mbit", None],
            }[rates.link]  # fmt: skip


def test_environment_is_that_of_a_launcher() -> None:
    layout = Layout.parse("2x2")
    ranks = [environment(layout, node, local) for node in range(2) for local in range(2)]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert [rank["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"10.77.0.1"}
    assert "RANK" not in environment(layout, 1, None)


def test_fill_leaves_other_braces_alone() -> None:
    words = ["--rank={node}", '{"a": {}}', "{master_addr}:{master_port}", "{nodes}x{ranks}"]
    filled = fill(words, Layout.parse("2x4"), 1, "hosts")
    assert filled == ["--rank=1", '{"a": {}}', "10.77.0.1:29500", "2x4"]


def test_pinning() -> None:
    assert pinning(Layout.parse("2"), [0, 1]) == [[0], [1]]
    assert pinning(Layout.parse("2"), [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert pinning(Layout.parse("4"), [3, 5]) == [[3], [5], [3], [5]]


def test_only_labs_of_ended_processes_are_abandoned() -> None:
    """A reused process number does not belong to the old process."""
    names = ["hclab-10-7-n0", "hclab-10-8-sw", "hclab-11-7-n1", "other", "hclab-10-7-x", "hclab-a"]
    started = {10: 8}
    assert namespaces.abandoned(names, started.get) == ["hclab-10-7-n0", "hclab-11-7-n1"]
    assert namespaces.OWNED.fullmatch(f"{namespaces.own_prefix()}n0")
    assert namespaces.abandoned([f"{namespaces.own_prefix()}sw"]) == []


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LabError, match="expected tc on PATH.*install iproute2"):
        namespaces.check_machine()
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="takes root, and this is user 1000; run it with sudo"):
        namespaces.check_machine()


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = netlab.arguments(["--layout", "2+2", "--uplink", "1mbit", "--", "run", "--layout", "9"])
    assert args.command == ["run", "--layout", "9"]
    assert netlab.build(args).rates == Rates(10**9, 10**6)
    for wrong, said in {
        ("--uplink", "1mbit"): "--uplink: expected a layout of several switches",
        ("--node-rate", "2=1mbit"): "--node-rate: expected nodes below 2, found 2",
        ("--node-rate", "1mbit"): "--node-rate: expected NODE=RATE",
    }.items():
        assert netlab.main([*wrong, "--", "true"]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        netlab.main(["--layout", "2"])
    capsys.readouterr()


@pytest.fixture(scope="module")
def root() -> None:
    """Skip if no lab can be built."""
    try:
        with Lab(Layout.parse("1"), Rates(10**9)):
            pass
    except LabError as error:
        pytest.skip(str(error))


#: a rank that sends 2 MB to the next node and receives as much; without torch, to start fast
TALK = """
import os, socket, threading
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
server = socket.create_server(("", 7000), reuse_port=False)
def serve():
    with server.accept()[0] as link:
        while link.recv(1 << 16):
            pass
thread = threading.Thread(target=serve)
thread.start()
import time
for attempt in range(200):
    try:
        link = socket.create_connection((f"10.77.0.{(rank + 1) % world + 1}", 7000))
        break
    except OSError:
        time.sleep(0.02)
with link:
    link.sendall(bytes(2_000_000))
thread.join()
batch = os.sched_getscheduler(0) == os.SCHED_BATCH
print(socket.gethostname(), sorted(os.sched_getaffinity(0)), batch)
"""


def test_bytes_and_rates_of_a_real_lab(root: None) -> None:
    """The counters match the bytes sent, a slow link is slow, and nothing remains."""
    core = min(os.sched_getaffinity(0))
    with Lab(Layout.parse("2"), Rates(10**9, nodes={1: 20 * 10**6}), cores=[core]) as lab:
        assert set(lab.names) <= set(namespaces.present())
        result = lab.run([sys.executable, "-c", TALK])
    assert not any(name.startswith(lab.prefix) for name in namespaces.present())
    assert result.statuses == (0, 0), result.outputs
    assert result.outputs == (f"node0 [{core}] False\n", f"node1 [{core}] False\n")
    with Lab(Layout.parse("1"), cores=[core]) as single:  # a dedicated core
        script = "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"
        assert single.run([sys.executable, "-c", script]).outputs == ("True\n",)
        tcp = [
            f"/proc/sys/net/ipv4/tcp_{n}" for n in ("slow_start_after_idle", "congestion_control")
        ]
        (shown,) = single.run(["cat", *tcp]).outputs
        assert shown.split() in (["0", "cubic"], ["0", "reno"])
    for traffic in result.traffic:  # headers of 66 bytes in 1514, and acknowledgements
        assert 2_000_000 < traffic.sent < 3_000_000  # including TCP's retransmissions
    assert min(result.seconds) > 0.7  # 0.8 s at 20 Mb/s; a limited link is never faster
    assert "20mbit" in lab.table(result)


def test_a_rank_that_fails_ends_the_others(root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "GRACE_S", 1.0)
    with Lab(Layout.parse("2")) as lab:
        words = ["sh", "-c", "[ $RANK = 0 ] && exit 7; sleep 1000"]
        result = lab.run(words)
        assert result.statuses == (7, 125)
        assert result.status == 7
        assert lab.run(["sleep", "1000"], timeout=0.2).statuses == (124, 124)


def interruptible() -> None:
    """Restore SIGINT, which a shell ignores for background jobs such as these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_no_exit_leaves_anything(root: None) -> None:
    """SIGTERM and SIGINT clean up; after SIGKILL the next lab does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, ROOT / "scripts/netlab.py", "--", "sh", "-c", "echo up; sleep 1000"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=interruptible,
        )
        assert process.stdout is not None
        with process, process.stdout as output:
            try:
                assert "up" in output.readline()
                process.send_signal(number)
                status = process.wait(60)
            finally:
                process.kill()
        left = [n for n in namespaces.present() if n.startswith(f"hclab-{process.pid}-")]
        if number == signal.SIGKILL:
            assert set(left) <= set(namespaces.sweep())
        else:
            assert status == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
            assert not left
    assert not namespaces.abandoned(namespaces.present())
