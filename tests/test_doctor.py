"""`onesided doctor`: it says what is there on any machine, also on one that has nothing, and never fails."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from onesided.transport import choose
from rich.console import Console

from onesided import Unsupported, _core
from onesided import doctor as examination
from onesided.cli import main
from onesided.doctor import Finding, Report, examine, show

GID = {"index": 3, "address": "10.0.0.7", "type": "RoCE v2", "interface": "eth0"}
LINK_LOCAL = {"index": 1, "address": "fe80::1", "type": "RoCE v2", "interface": "eth0"}


def port(name: str = "mlx5_0:1", **changes: Any) -> dict[str, Any]:
    """A port in the shape of _core.survey_ports(): usable and chosen, unless changed."""
    made = {
        "name": name,
        "device": name.partition(":")[0],
        "port": 1,
        "link_layer": "Ethernet",
        "state": "ACTIVE",
        "lid": 0,
        "mtu": 4096,
        "gigabits_per_second": 100.0,
        "numa_node": 0,
        "pci_path": "/sys/devices/pci0000:00/0000:00:01.0",
        "firmware": "28.1",
        "atomics": True,
        "gids": [LINK_LOCAL, GID],
        "usable": True,
        "chosen": True,
        "gid": GID,
        "why": "RoCE v2, global address, the only port",
    }
    return {**made, **changes}


def unusable(why: str, name: str = "mlx5_0:1", **changes: Any) -> dict[str, Any]:
    return port(name, usable=False, chosen=False, gid=None, why=why, **changes)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root folder with nothing in it: no proc, no sys, no dev."""
    return tmp_path


def write(root: Path, **files: str) -> None:
    for path, text in files.items():
        file = root / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def find(report: Report, group: str, name: str) -> Finding:
    (found,) = [finding for finding in report.findings if (finding.group, finding.name) == (group, name)]
    return found


def look(root: Path, *ports: dict[str, Any]) -> Report:
    return examine(root, lambda: list(ports))


def printed(report: Report) -> str:
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        show(report, console)
    return capture.get()


# ---- The report as a whole -----------------------------------------------------------------------------------------


def test_this_machine() -> None:
    """Both outputs, and exit status 0 whatever is here."""
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert "Transports" in shown.output
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert set(report) == {"format", "onesided", "findings", "ports"}
    assert report["format"] == 1
    for finding in report["findings"]:
        assert set(finding) == {"group", "name", "level", "says", "mend", "data"}
        assert finding["level"] in {"ok", "note", "problem"}
        assert finding["says"]
        assert finding["mend"] or finding["level"] != "problem"
        assert "\n" not in (finding["mend"] or "")
    keys = [(finding["group"], finding["name"]) for finding in report["findings"]]
    assert len(set(keys)) == len(keys)
    assert set(report) == {"format", "onesided", "findings", "ports"}


def test_documented_names_are_there(machine: Path) -> None:
    """Each finding that the module's text lists is in the report, and the other way round."""
    text = " ".join((examination.__doc__ or "").split("Names of findings. ")[1].split())
    documented = {
        (group.strip(), name.strip())
        for part in text.rstrip(".").split(". ")
        for group, _, names in [part.partition(":")]
        for name in names.split(",")
        if "each " not in name
    }
    report = look(machine)
    assert {(f.group, f.name) for f in report.findings} - {("transport", kind) for kind in choose.KINDS} == documented
    assert all(f'"{key}"' in (examination.__doc__ or "") for key in port())


def test_ports_have_the_documented_keys() -> None:
    if _core.verbs_unavailable():
        pytest.skip(_core.verbs_unavailable())
    for found in _core.survey_ports():
        assert set(found) == set(port())


@pytest.mark.skipif("ONESIDED_SOFTROCE" not in os.environ, reason="not inside tests/softroce/run")
def test_soft_roce() -> None:
    """Real verbs: both rails are chosen, with their routable addresses."""
    report = examine()
    chosen = {port["name"]: port["gid"]["address"] for port in report.ports if port["chosen"]}
    assert chosen == {"rxe0:1": "10.77.0.1", "rxe1:1": "10.77.1.1"}
    assert [finding for finding in report.findings if finding.level == "problem"] == []
    (pinned,) = [port for port in _core.survey_ports(["rxe1:1/0"]) if port["chosen"]]
    assert pinned["name"] == "rxe1:1"
    assert "link-local" in pinned["why"]


def test_a_wrong_pin_is_named() -> None:
    if _core.verbs_unavailable():
        pytest.skip(_core.verbs_unavailable())
    with pytest.raises(Unsupported, match="'pigeon_0' of nics or ONESIDED_NICS: there is no such port"):
        _core.survey_ports(["pigeon_0"])


def test_a_machine_with_nothing(machine: Path) -> None:
    """Nothing fails; what cannot be told says so; nothing of it is a problem."""
    report = look(machine)
    assert {finding.level for finding in report.findings} == {"ok", "note"}
    assert find(report, "rdma", "device").level == "note"
    assert "no RDMA in this kernel" in find(report, "rdma", "device").says
    for group, name in [("memory", "max_map_count"), ("memory", "huge pages"), ("rdma", "modules")]:
        assert find(report, group, name).level == "note"
        assert find(report, group, name).says.startswith("cannot be told: ")
    assert "No problems" in printed(report)


def test_a_survey_that_fails_is_a_problem_and_no_more(machine: Path) -> None:
    def broken() -> list[dict[str, Any]]:
        raise RuntimeError("the driver is upside down")

    report = examine(machine, broken)
    if _core.verbs_unavailable():
        pytest.skip(_core.verbs_unavailable())
    device = find(report, "rdma", "device")
    assert device.level == "problem"
    assert "RuntimeError: the driver is upside down" in device.says
    assert find(report, "machine", "python").level == "ok"


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from onesided.doctor import examine; report = examine(); "
        "print(*({'torch', 'cuda', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not ran.stdout.split()


# ---- RDMA ----------------------------------------------------------------------------------------------------------

needs_verbs = pytest.mark.skipif(
    bool(_core.verbs_unavailable()), reason=_core.verbs_unavailable() or "libibverbs is here"
)


@needs_verbs
def test_ports_are_told_in_full(machine: Path) -> None:
    report = look(machine, port(), port("mlx5_1:1", chosen=False, gid=None, atomics=False, why="slower: 25 Gb/s"))
    assert find(report, "rdma", "device").says == "mlx5_0, mlx5_1; ports that would be used: 1"
    first, second = find(report, "rdma", "mlx5_0:1"), find(report, "rdma", "mlx5_1:1")
    assert first.level == second.level == "ok"
    assert (
        first.says
        == "Ethernet, ACTIVE, 100 Gb/s, MTU 4096, NUMA node 0; chosen: RoCE v2, global address, the only port"
    )
    assert second.says.endswith("no atomics; not chosen: slower: 25 Gb/s")
    shown = printed(report)
    assert "GID 1: fe80::1, RoCE v2, eth0\n" in shown.replace(" \n", "\n").replace("  ", "")
    assert "GID 3: 10.0.0.7, RoCE v2, eth0 <- used" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert report.as_dict()["ports"] == report.ports


@needs_verbs
@pytest.mark.parametrize(
    ("why", "mend"),
    [
        ("port is DOWN", "ip link set eth0 up"),
        ("port is INIT: its subnet manager has not made it active", "opensm"),
        ("no usable GID: its table is empty (has the interface an address?)", "ip addr add"),
        ("no usable GID: docker0 is a bridge of containers, which leads only into this host; pin", "pin the port"),
        ("does not open: Permission denied (errno 13)", "permission for /dev/infiniband"),
        ("does not open: Input/output error (errno 5)", "dmesg"),
        ("does not tell its limits: Input/output error (errno 5)", "ibv_devinfo"),
    ],
)
def test_a_port_that_cannot_be_used(machine: Path, why: str, mend: str) -> None:
    """A problem with its remedy; no more than a note where another port works."""
    alone = find(look(machine, unusable(why)), "rdma", "mlx5_0:1")
    assert alone.level == "problem"
    assert f"not chosen: {why}" in alone.says
    assert mend in (alone.mend or "")
    beside = find(look(machine, unusable(why), port("mlx5_1:1")), "rdma", "mlx5_0:1")
    assert (beside.level, beside.mend) == ("note", alone.mend)


@needs_verbs
def test_a_device_that_does_not_open(machine: Path) -> None:
    closed = unusable("does not open: Permission denied (errno 13)", "mlx5_0", port=0, state="", gids=[])
    report = look(machine, closed)
    assert find(report, "rdma", "mlx5_0").says == "not chosen: does not open: Permission denied (errno 13)"
    shown = printed(report)
    assert shown.index("Problems") > shown.index("Machine")
    assert "To mend it: give this user read" in " ".join(shown.split())


@needs_verbs
def test_other_kinds_of_devices_are_no_problem(machine: Path) -> None:
    why = "it is an iWARP device; those of InfiniBand and RoCE can be used"
    assert find(look(machine, unusable(why, "siw0:1")), "rdma", "siw0:1").level == "note"


@needs_verbs
def test_long_gid_tables_are_cut(machine: Path) -> None:
    gids = [{**GID, "index": i, "address": f"10.0.0.{i}"} for i in range(100)]
    shown = printed(look(machine, port(gids=gids, gid=gids[50])))
    assert "GID 7: " in shown
    assert "GID 8: " not in shown
    assert "GID 50: 10.0.0.50, RoCE v2, eth0 <- used" in shown
    assert "and 91 more GIDs" in shown


@needs_verbs
def test_devices_that_libibverbs_does_not_see(machine: Path) -> None:
    (machine / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    report = look(machine)
    assert find(report, "rdma", "device").level == "problem"
    assert "ibverbs-providers" in (find(report, "rdma", "device").mend or "")
    assert find(report, "rdma", "uverbs").level == "problem"
    assert "--device /dev/infiniband" in (find(report, "rdma", "uverbs").mend or "")


def test_without_libibverbs(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "verbs_unavailable", lambda: "libibverbs is not installed")
    report = look(machine, port())
    assert find(report, "rdma", "libibverbs").says == "libibverbs is not installed; only RDMA needs it"
    assert find(report, "rdma", "libibverbs").level == "note"
    assert report.ports == []
    (machine / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert find(look(machine), "rdma", "device").level == "problem"


def test_uverbs_permissions(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine, dev__infiniband__uverbs0="", dev__infiniband__uverbs10="", dev__infiniband__uverbs2="")
    uverbs = find(look(machine), "rdma", "uverbs")
    assert uverbs.level == "ok"
    assert uverbs.data == {"files": ["uverbs0", "uverbs2", "uverbs10"], "refused": []}
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).endswith("uverbs2"))  # root may open all
    refused = find(look(machine), "rdma", "uverbs")
    assert refused.level == "problem"
    assert refused.says == "this user may not open uverbs2 in /dev/infiniband"


def test_modules(machine: Path) -> None:
    write(machine, proc__modules="ib_uverbs 1 0 - Live 0x0\nnv_peer_mem 1 0 - Live 0x0\nrdma_rxe_not 1 0 - Live 0x0")
    found = find(look(machine), "rdma", "modules")
    assert found.data == {"ib_uverbs": True, "rdma_rxe": False, "peer_memory": "nv_peer_mem"}
    (machine / "sys/module/rdma_rxe").mkdir(parents=True)
    assert find(look(machine), "rdma", "modules").data["rdma_rxe"] is True


def test_modules_that_are_built_in(machine: Path) -> None:
    (machine / "sys/class/infiniband_verbs").mkdir(parents=True)
    write(machine, sys__module__kernel__x="", sys__class__infiniband__rxe0__parent="eth0")
    found = find(look(machine), "rdma", "modules")
    assert found.level == "ok"
    assert found.data == {"ib_uverbs": True, "rdma_rxe": True, "peer_memory": None}


@needs_verbs
@pytest.mark.parametrize(
    ("limits", "capabilities", "ports", "level", "says"),
    [
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "0", True, "ok", "unlimited soft, unlimited hard"),
        ((8 << 20, 8 << 20), "0", False, "ok", "8 MiB soft, 8 MiB hard: binds what RDMA registers"),
        ((64 << 10, resource.RLIM_INFINITY), "0", True, "problem", "64 KiB soft, unlimited hard: registering more"),
        ((64 << 30, 64 << 30), "0", True, "note", "64 GiB soft, 64 GiB hard: registering more"),
        ((64 << 10, 64 << 10), "4000", True, "ok", "CAP_IPC_LOCK"),
    ],
)
def test_memlock(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    capabilities: str,
    ports: bool,
    level: str,
    says: str,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits)
    write(machine, proc__self__status=f"Name:\tx\nCapEff:\t{capabilities:0>16}", proc__self__uid_map="0 0 4294967295")
    found = find(look(machine, *[port()] * ports), "rdma", "memlock")
    assert found.level == level
    assert says in found.says
    if capabilities != "0":  # within a user namespace the kernel does not count it
        write(machine, proc__self__uid_map="0 1000 1")
        assert find(look(machine, port()), "rdma", "memlock").level == "problem"


# ---- Memory and the rest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "capabilities", "level", "mend"),
    [
        (None, "0", "ok", None),
        ("0", "0", "ok", None),
        ("1", "0", "note", "sysctl -w kernel.yama.ptrace_scope=0"),
        ("1", "80000", "ok", None),
        ("3", "80000", "note", "start the system with a lower ptrace_scope"),
    ],
)
def test_cross_memory_attach(machine: Path, scope: str | None, capabilities: str, level: str, mend: str | None) -> None:
    write(machine, proc__self__status=f"CapEff:\t{capabilities}", proc__self__uid_map="0 0 4294967295")
    if scope is not None:
        write(machine, proc__sys__kernel__yama__ptrace_scope=scope)
    found = find(look(machine), "memory", "cross-memory attach")
    if not found.data["system_call"]:
        pytest.skip(found.says)
    assert (found.level, found.mend) == (level, mend)


def test_a_sandbox_that_forbids_the_system_calls(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(examination, "_process_vm_readv", lambda: "Operation not permitted")
    monkeypatch.setattr(os, "memfd_create", refused)
    report = look(machine)
    assert find(report, "memory", "cross-memory attach").level == "note"
    assert "seccomp" in (find(report, "memory", "cross-memory attach").mend or "")
    assert find(report, "memory", "memfd").says == "memfd_create: Operation not permitted"
    assert find(report, "memory", "memfd").level == "problem"


def test_memory_settings(machine: Path) -> None:
    write(
        machine,
        proc__sys__vm__max_map_count="1000",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never",
        sys__kernel__mm__transparent_hugepage__shmem_enabled="always within_size advise [never] deny force",
        proc__meminfo="MemTotal: 1048576 kB\nMemAvailable: 524288 kB",
    )
    pool = machine / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "nr_hugepages").write_text("8\n")
    (pool / "free_hugepages").write_text("3\n")
    report = look(machine)
    assert find(report, "memory", "max_map_count").level == "note"
    assert find(report, "memory", "huge pages").says == "8 of 2 MiB (3 free)"
    assert find(report, "memory", "huge pages").data == {"pools": [{"size": 2 << 20, "total": 8, "free": 3}]}
    assert find(report, "memory", "transparent huge pages").data == {"private": "madvise", "shared": "never"}
    assert find(report, "machine", "memory").says == "1 GiB, 512 MiB available"
    write(machine, proc__sys__vm__max_map_count="65530")
    assert find(look(machine), "memory", "max_map_count").level == "ok"


@needs_verbs
def test_gpus(machine: Path) -> None:
    gpu = machine / "proc/driver/nvidia/gpus/0000:1B:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 123\n")
    (machine / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n"
    )
    node = machine / "sys/bus/pci/devices/0000:1b:00.0/numa_node"
    node.parent.mkdir(parents=True)
    node.write_text("1\n")
    report = look(machine)
    assert find(report, "gpu", "driver").says == "NVIDIA 550.54.15"
    assert find(report, "gpu", "devices").level == "ok"
    assert find(report, "gpu", "devices").data == {
        "gpus": [{"pci": "0000:1B:00.0", "model": "NVIDIA H200", "numa_node": 1}]
    }
    beside_nic = find(look(machine, port()), "gpu", "devices")
    assert (beside_nic.level, beside_nic.mend) == ("note", "modprobe nvidia_peermem")


def test_numa_nodes(machine: Path) -> None:
    for node, cpus in (("0", "0-1"), ("10", ""), ("2", "2-3")):
        folder = machine / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    found = find(look(machine), "machine", "NUMA nodes")
    assert found.says == "0 (CPUs 0-1), 2 (CPUs 2-3), 10 (CPUs none)"


def test_auto_is_explained(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was passed over is named, and so is a machine on which nothing works."""

    class Refused:
        @staticmethod
        def unsupported_reason() -> str:
            return "no such luck"

    shm = choose.KINDS["shm"]
    monkeypatch.setattr(choose, "KINDS", {"pigeon": Refused, "shm": shm})
    report = look(machine)
    assert find(report, "transport", "auto").says == "picks shm: pigeon cannot be used"
    assert find(report, "transport", "pigeon").says == "no such luck"
    assert find(report, "transport", "pigeon").level == "note"
    monkeypatch.setattr(choose, "KINDS", {"pigeon": Refused})
    nothing = find(look(machine), "transport", "auto")
    assert nothing.level == "problem"
    assert "pigeon: no such luck" in nothing.says
