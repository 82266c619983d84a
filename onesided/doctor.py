"""`onesided doctor`: what this machine has for one-sided communication, what would be chosen, and what is in the way.

Nothing is changed, and nothing fails: a probe that cannot be done is a finding that says why.

`onesided doctor --json` writes one object. Keys, groups and names of findings stay as they are; more may be added.

    {"format": 1,
     "onesided": "0.1.0",
     "findings": [{"group": "rdma",            # transport, rdma, memory, gpu, machine
                   "name": "memlock",          # unique within its group
                   "level": "problem",         # ok, note, problem
                   "says": "8 MiB soft, ...",  # for people
                   "mend": "ulimit -l ...",    # one line for every problem and some notes, else null
                   "data": {"soft": 8388608, "hard": null}}],     # for programs; null: no limit, or not known
     "ports": [{"name": "mlx5_0:1", "device": "mlx5_0", "port": 1,          # port 0: the device does not open
                "link_layer": "Ethernet", "state": "ACTIVE", "lid": 0, "mtu": 4096, "gigabits_per_second": 100.0,
                "numa_node": 0, "pci_path": "/sys/devices/...", "firmware": "...", "atomics": true,
                "usable": true, "chosen": true, "why": "RoCE v2, global address, best of 2 ports",
                "gid": {...} or null,          # the one that would be used
                "gids": [{"index": 3, "address": "10.0.0.7", "type": "RoCE v2", "interface": "eth0"}]}]}

Names of findings. transport: auto, and each kind that auto looks at. rdma: libibverbs, device, each port by its name,
uverbs, modules, memlock, dma-buf. memory: memfd, cross-memory attach, max_map_count, huge pages, transparent huge
pages. gpu: torch, cuda-python, driver, devices. machine: kernel, CPUs, NUMA nodes, memory, python, libraries.
"""

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, _core
from .errors import Unsupported

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Finding", "Report", "examine", "show"]

FORMAT = 1
GROUPS = {"transport": "Transports", "rdma": "RDMA", "memory": "Memory", "gpu": "GPU", "machine": "Machine"}
MOST_GIDS_SHOWN = 8  # some tables have hundreds
MEMLOCK_ENOUGH = 1 << 30  # below, registering the weights of one model fails
USUAL_MAP_COUNT = 65530  # the kernel's default
CAP_IPC_LOCK, CAP_SYS_PTRACE = 14, 19
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")

Port = dict[str, Any]  # as _core.survey_ports() gives it


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `mend` is one line on what to do, for every problem and for some notes."""

    group: str
    name: str
    level: str
    says: str
    mend: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All findings in the order they are shown, and the RDMA ports in full."""

    findings: list[Finding]
    ports: list[Port]

    def as_dict(self) -> dict[str, Any]:
        """What `--json` writes."""
        findings = [asdict(finding) for finding in self.findings]
        return {"format": FORMAT, "onesided": __version__, "findings": findings, "ports": self.ports}


# What a probe answers: a Finding without its group and name.
Answer = Callable[[str, str], Finding]


def ok(says: str, **data: Any) -> Answer:
    return lambda group, name: Finding(group, name, "ok", says, data=data)


def note(says: str, mend: str | None = None, **data: Any) -> Answer:
    return lambda group, name: Finding(group, name, "note", says, mend, data)


def problem(says: str, mend: str, **data: Any) -> Answer:
    return lambda group, name: Finding(group, name, "problem", says, mend, data)


def survey() -> list[Port]:
    """Every RDMA port, as the core sees it; those that ONESIDED_NICS names are the ones that are chosen."""
    from .transport.rdma import nics_of_environment

    return list(_core.survey_ports(nics_of_environment()))


def examine(root: Path = Path("/"), survey: Callable[[], list[Port]] = survey) -> Report:
    """Looks at everything. `root` is where proc, sys and dev are, and `survey` what finds the ports, for tests."""
    return _Examination(root, survey).report()


class _Examination:
    """The probes: one method each."""

    def __init__(self, root: Path, survey: Callable[[], list[Port]]) -> None:
        from .transport.choose import KINDS

        self.root = root
        self.kinds = KINDS
        self.ports: list[Port] = []
        self.unavailable = ""
        self.survey_failed = ""
        try:
            self.unavailable = _core.verbs_unavailable()
            if not self.unavailable:
                self.ports = survey()
        except Exception as error:  # noqa: BLE001 - whatever a driver does, the other findings are wanted
            self.survey_failed = _reason(error)
        self.any_chosen = any(port["chosen"] for port in self.ports)

    def report(self) -> Report:
        probes: dict[str, dict[str, Callable[[], Answer]]] = {
            "transport": {
                "auto": self.auto,
                **{name: partial(self.transport, name) for name in self.kinds},
            },
            "rdma": {
                "libibverbs": self.libibverbs,
                "device": self.rdma_devices,
                **{str(port["name"]): partial(self.rdma_port, port) for port in self.ports},
                "uverbs": self.uverbs,
                "modules": self.modules,
                "memlock": self.memlock,
                "dma-buf": self.dmabuf,
            },
            "memory": {
                "memfd": self.memfd,
                "cross-memory attach": self.cross_memory,
                "max_map_count": self.max_map_count,
                "huge pages": self.huge_pages,
                "transparent huge pages": self.transparent_huge_pages,
            },
            "gpu": {
                "torch": self.torch,
                "cuda-python": self.cuda_python,
                "driver": self.gpu_driver,
                "devices": self.gpus,
            },
            "machine": {
                "kernel": self.kernel,
                "CPUs": self.cpus,
                "NUMA nodes": self.numa_nodes,
                "memory": self.total_memory,
                "python": self.python,
                "libraries": self.libraries,
            },
        }
        findings = []
        for group, of_group in probes.items():
            for name, probe in of_group.items():
                try:
                    answer = probe()
                except Exception as error:  # noqa: BLE001 - a probe that fails is a finding
                    answer = note(f"cannot be told: {_reason(error)}")
                findings.append(answer(group, name))
        return Report(findings, self.ports)

    # ---- What probes read ------------------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        return (self.root / path).read_text(errors="replace").strip()

    def read_or(self, path: str, otherwise: str = "") -> str:
        try:
            return self.read(path)
        except OSError:
            return otherwise

    def has(self, folder: str) -> bool:
        return (self.root / folder).is_dir()

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """The names in a folder, numbers by their value; none if there is no such folder."""
        found = [path.name for path in (self.root / folder).glob(pattern)]
        return sorted(
            found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        )

    def find(self, pattern: str, path: str) -> str | None:
        """What the pattern's group matches in a file; None if it does not, or if there is no such file."""
        match = re.search(pattern, self.read_or(path), re.MULTILINE)
        return match[1].strip() if match else None

    def capable(self, capability: int) -> bool:
        """Whether the kernel lets this process do it: a capability within a user namespace does not count for that."""
        bits = int(self.find(r"^CapEff:\s*([0-9a-f]+)", "proc/self/status") or "0", 16)
        whole_host = self.read_or("proc/self/uid_map").split() == ["0", "0", "4294967295"]
        return bool(bits >> capability & 1) and whole_host

    def module(self, name: str) -> bool:
        """Loaded, or built into the kernel with something to show in sysfs."""
        return self.find(rf"^({name})\b", "proc/modules") is not None or self.has(f"sys/module/{name}")

    # ---- Transports ------------------------------------------------------------------------------------------------

    def auto(self) -> Answer:
        from .transport import choose_kind

        try:
            picked = choose_kind("auto")
        except Unsupported as error:
            return problem(str(error), "mend any of these; shm needs nothing but memfd", chosen=None)
        others = list(self.kinds)
        before = others[: others.index(picked)]
        if before:
            why = f"{' and '.join(before)} cannot be used"
        else:
            why = f"the first of {', '.join(others)}" if len(others) > 1 else "the only kind of this version"
        return ok(f"picks {picked}: {why}", chosen=picked)

    def transport(self, kind: str) -> Answer:
        reason = self.kinds[kind].unsupported_reason()
        return note(reason, supported=False) if reason else ok("can be used", supported=True)

    # ---- RDMA ------------------------------------------------------------------------------------------------------

    def libibverbs(self) -> Answer:
        if self.unavailable:
            return note(f"{self.unavailable}; only RDMA needs it", version=None)
        # The kernel tells the file that was loaded, links resolved: libibverbs.so.1.14.44.0 is of rdma-core 44.0.
        loaded = re.search(r"(\S*/libibverbs\.so\.\d+\.\d+\.(\S+))", Path("/proc/self/maps").read_text())
        if loaded is None:
            return ok("there; its version is not known", version=None)
        return ok(f"rdma-core {loaded[2]} ({loaded[1]})", version=loaded[2])

    def rdma_devices(self) -> Answer:
        in_sysfs = self.names("sys/class/infiniband")
        devices = list(dict.fromkeys(str(port["device"]) for port in self.ports))
        if self.survey_failed:
            mend = "run ibv_devinfo (of the package ibverbs-utils), and look into the kernel's log (dmesg)"
            return problem(f"cannot be looked for: {self.survey_failed}", mend, devices=in_sysfs)
        if devices:
            chosen = sum(port["chosen"] for port in self.ports)
            return ok(f"{', '.join(devices)}; ports that would be used: {chosen}", devices=devices)
        if in_sysfs and self.unavailable:
            return problem(f"{', '.join(in_sysfs)}, but {self.unavailable}", "install libibverbs", devices=in_sysfs)
        if in_sysfs:
            mend = "install its driver (ibverbs-providers), and in a container pass /dev/infiniband into it"
            return problem(f"{', '.join(in_sysfs)} in sysfs, but libibverbs sees none", mend, devices=in_sysfs)
        kernel = "no device in /sys/class/infiniband" if self.has("sys/class/infiniband") else "no RDMA in this kernel"
        return note(f"none ({kernel}); peers on one host need none", devices=[])

    def rdma_port(self, port: Port) -> Answer:
        facts = []
        if port["state"]:
            speed = port["gigabits_per_second"]
            facts = [port["link_layer"], port["state"], f"{speed:g} Gb/s" if speed else "speed unknown"]
            facts.append(f"MTU {port['mtu']}")
            if port["link_layer"] == "InfiniBand":
                facts.append(f"LID {port['lid']}")
            facts.append(f"NUMA node {port['numa_node']}" if port["numa_node"] >= 0 else "no NUMA node")
            if not port["pci_path"]:
                facts.append("software")
            if not port["atomics"]:
                facts.append("no atomics")
        says = "; ".join(
            [", ".join(facts)] * bool(facts) + [("" if port["chosen"] else "not ") + f"chosen: {port['why']}"]
        )
        data = {"usable": port["usable"], "chosen": port["chosen"]}
        if port["usable"]:
            return ok(says, **data)
        mend = _mend_port(str(port["why"]), port)
        # A port less is no problem where others work.
        return note(says, mend, **data) if self.any_chosen or mend is None else problem(says, mend, **data)

    def uverbs(self) -> Answer:
        files = self.names("dev/infiniband", "uverbs*")
        refused = [name for name in files if not os.access(self.root / "dev/infiniband" / name, os.R_OK | os.W_OK)]
        data = {"files": files, "refused": refused}
        if refused:
            mend = "give read and write permission, by a udev rule or by the group of the files (some systems: rdma)"
            return problem(f"this user may not open {', '.join(refused)} in /dev/infiniband", mend, **data)
        if files:
            return ok(f"this user may open {', '.join(files)} in /dev/infiniband", **data)
        if self.names("sys/class/infiniband"):
            mend = "modprobe ib_uverbs; for a container: --device /dev/infiniband"
            return problem("there is a device, but no /dev/infiniband/uverbs*", mend, **data)
        return ok("no /dev/infiniband, as there is no device", **data)

    def modules(self) -> Answer:
        if not self.has("sys/module") and not self.read_or("proc/modules"):
            return note("cannot be told: neither /proc/modules nor /sys/module is here")
        # What is built in and takes no parameters is seen in neither, but by what it makes.
        uverbs = self.module("ib_uverbs") or self.has("sys/class/infiniband_verbs")
        rxe = self.module("rdma_rxe") or bool(self.names("sys/class/infiniband", "*/parent"))
        peer_memory = next(filter(self.module, PEER_MEMORY), None)
        loaded = {"ib_uverbs": uverbs, "rdma_rxe": rxe, peer_memory or PEER_MEMORY[0]: peer_memory is not None}
        says = ", ".join(f"{name} is {'there' if there else 'not loaded'}" for name, there in loaded.items())
        data = {"ib_uverbs": uverbs, "rdma_rxe": rxe, "peer_memory": peer_memory}
        if self.names("sys/class/infiniband") and not uverbs:
            return problem(says, "modprobe ib_uverbs", **data)
        return ok(says, **data)

    def memlock(self) -> Answer:
        limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
        exempt = self.capable(CAP_IPC_LOCK)
        data = {"soft": soft, "hard": hard, "exempt": exempt}
        says = f"{_bytes(soft)} soft, {_bytes(hard)} hard: "
        if soft is None:
            return ok(says + "all memory can be registered", **data)
        if exempt:
            return ok(says + "does not bind, as this process has CAP_IPC_LOCK", **data)
        if not self.ports:
            return ok(says + "binds what RDMA registers, and there is no RDMA here", **data)
        says += "registering more than that fails"
        mend = (
            "ulimit -l unlimited (before: memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd "
            "unit, or --ulimit memlock=-1 of a container)"
        )
        return problem(says, mend, **data) if soft < MEMLOCK_ENOUGH else note(says, mend, **data)

    def dmabuf(self) -> Answer:
        kernel = platform.release()
        number = re.match(r"(\d+)\.(\d+)", kernel)
        new_enough = number is not None and (int(number[1]), int(number[2])) >= (5, 12)
        try:
            in_library = hasattr(ctypes.CDLL("libibverbs.so.1"), "ibv_reg_dmabuf_mr")
        except OSError:
            in_library = False
        says = (
            f"kernel {kernel} is {'new' if new_enough else 'not new'} enough (5.12), libibverbs "
            f"{'has' if in_library else 'lacks'} ibv_reg_dmabuf_mr; "
        )
        data: dict[str, Any] = {"kernel": new_enough, "library": in_library}
        if new_enough and in_library:
            return ok(says + "the drivers of NIC and GPU have the last word", **data)
        return note(says + "only memory of GPUs needs both", **data)

    # ---- Memory ----------------------------------------------------------------------------------------------------

    def memfd(self) -> Answer:
        try:
            os.close(os.memfd_create("onesided-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            mend = "let the sandbox of this process (seccomp) permit memfd_create; there is no shm without it"
            return problem(f"memfd_create: {error.strerror}", mend, works=False)
        return ok("works: processes of this host can share windows", works=True)

    def cross_memory(self) -> Answer:
        text = self.read_or("proc/sys/kernel/yama/ptrace_scope")
        scope = int(text) if text else 0
        exempt = self.capable(CAP_SYS_PTRACE)
        refusal = _process_vm_readv()
        data = {"ptrace_scope": scope if text else None, "exempt": exempt, "system_call": refusal is None}
        without = "windows over memory that they did not allocate cannot be created"
        if refusal is not None:
            mend = "let the sandbox of this process (seccomp) permit process_vm_readv and process_vm_writev"
            return note(f"process_vm_readv: {refusal}; {without}", mend, **data)
        if scope == 0:
            says = f"works between processes of one user ({'ptrace_scope is 0' if text else 'this kernel has no Yama'})"
            return ok(says, **data)
        if exempt and scope < 3:
            return ok(f"works: ptrace_scope is {scope}, but this process has CAP_SYS_PTRACE", **data)
        mend = "sysctl -w kernel.yama.ptrace_scope=0" if scope < 3 else "start the system with a lower ptrace_scope"
        return note(f"ptrace_scope is {scope}: {without}", mend, **data)

    def max_map_count(self) -> Answer:
        count = int(self.read("proc/sys/vm/max_map_count"))
        says = f"{count:,} mappings a process"
        if count >= USUAL_MAP_COUNT:
            return ok(says, mappings=count)
        mend = "sysctl -w vm.max_map_count=262144"
        return note(f"{says}, fewer than usual; each remote memory takes one", mend, mappings=count)

    def huge_pages(self) -> Answer:
        folder = "sys/kernel/mm/hugepages"
        if not self.has(folder):
            return note("cannot be told: there is no /sys/kernel/mm/hugepages")
        pools = []
        for name in self.names(folder):
            size = int(name.removeprefix("hugepages-").removesuffix("kB")) << 10
            total, free = (int(self.read(f"{folder}/{name}/{count}_hugepages")) for count in ("nr", "free"))
            pools.append({"size": size, "total": total, "free": free})
        says = ", ".join(f"{pool['total']} of {_bytes(pool['size'])} ({pool['free']} free)" for pool in pools)
        return ok(says or "none", pools=pools)

    def transparent_huge_pages(self) -> Answer:
        folder = "sys/kernel/mm/transparent_hugepage"
        settings = {
            "private": self.find(r"\[(\w+)\]", f"{folder}/enabled"),
            "shared": self.find(r"\[(\w+)\]", f"{folder}/shmem_enabled"),
        }
        if not any(settings.values()):
            return note(f"cannot be told: there is no /{folder}", **settings)
        return ok(", ".join(f"{use} memory: {setting or 'not known'}" for use, setting in settings.items()), **settings)

    # ---- GPU -------------------------------------------------------------------------------------------------------

    def torch(self) -> Answer:
        version = _version("torch")
        if version is None:
            return ok("not installed; arrays and buffers can be put all the same", version=None, cuda=None)
        # Importing torch takes seconds and may fail by itself; a file of it says what it was built for.
        try:
            text = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
        except OSError as error:
            return note(f"{version}; cannot be told for which CUDA: {_reason(error)}", version=version, cuda=None)
        built = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        cuda = built[1] if built else None
        return ok(f"{version}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}", version=version, cuda=cuda)

    def cuda_python(self) -> Answer:
        version = _version("cuda-python") or _version("cuda-bindings")
        return ok(version or "not installed", version=version)

    def gpu_driver(self) -> Answer:
        version = self.find(r"\b(\d+\.\d+(?:\.\d+)?)\b", "proc/driver/nvidia/version")
        return ok(f"NVIDIA {version}" if version else "none of NVIDIA (no /proc/driver/nvidia)", version=version)

    def gpus(self) -> Answer:
        found = []
        for address in self.names("proc/driver/nvidia/gpus"):
            model = self.find(r"^Model:\s*(.+)$", f"proc/driver/nvidia/gpus/{address}/information")
            node = int(self.read_or(f"sys/bus/pci/devices/{address.lower()}/numa_node", "-1"))
            found.append({"pci": address, "model": model, "numa_node": node})
        says = ", ".join(f"{gpu['model'] or 'unknown model'} at {gpu['pci']}" for gpu in found)
        if found and self.ports and not any(map(self.module, PEER_MEMORY)):
            says += "; without nvidia_peermem a NIC reaches their memory by dma-buf only"
            return note(says, "modprobe nvidia_peermem", gpus=found)
        return ok(says or "none seen", gpus=found)

    # ---- Machine ---------------------------------------------------------------------------------------------------

    def kernel(self) -> Answer:
        system, release, machine = platform.system(), platform.release(), platform.machine()
        return ok(f"{system} {release}, {machine}", system=system, release=release, machine=machine)

    def cpus(self) -> Answer:
        usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
        model = self.find(r"^model name\s*:(.+)$", "proc/cpuinfo")
        says = f"{usable} of {total} for this process" + (f", {model}" if model else "")
        return ok(says, usable=usable, total=total, model=model)

    def numa_nodes(self) -> Answer:
        folder = "sys/devices/system/node"
        cpus = {name[4:]: self.read_or(f"{folder}/{name}/cpulist") for name in self.names(folder, "node[0-9]*")}
        says = ", ".join(f"{node} (CPUs {of_node or 'none'})" for node, of_node in cpus.items())
        return ok(says or "the kernel tells of none: all memory is equally near", nodes=cpus)

    def total_memory(self) -> Answer:
        total, available = (
            int(self.find(rf"^{name}:\s*(\d+)", "proc/meminfo") or "0") << 10 for name in ("MemTotal", "MemAvailable")
        )
        return ok(f"{_bytes(total)}, {_bytes(available)} available", total=total, available=available)

    def python(self) -> Answer:
        version = platform.python_version()
        return ok(f"{platform.python_implementation()} {version}", version=version, executable=sys.executable)

    def libraries(self) -> Answer:
        others = {name: _version(name) for name in ("grpcio", "protobuf", "numpy", "rich", "click")}
        versions = {"onesided": __version__, **others}
        says = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
        return ok(says, **versions)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _bytes(count: int | None) -> str:
    if count is None:
        return "unlimited"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} bytes"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mend_port(why: str, port: Port) -> str | None:
    """What to do about a port that cannot be used; None where nothing is wrong, but it is of another kind."""
    interface = next((gid["interface"] for gid in port["gids"] if gid["interface"]), "INTERFACE")
    if "iWARP" in why or "reliable connections" in why:
        return None
    if "errno 13" in why or "errno 1)" in why:
        return "give this user read and write permission for /dev/infiniband/uverbs*"
    if why.startswith("does not open"):
        return "look into the kernel's log (dmesg); in a container, pass /dev/infiniband into it"
    if "subnet manager" in why:
        return "start a subnet manager in this fabric (opensm, or the one of a switch)"
    if why.startswith("port is"):
        return f"look at the cable and at the interface (ip link set {interface} up)"
    if "only into this host" in why:
        return "pin the port if all peers are on this host, else take another"
    if why.startswith("no usable GID"):
        return f"give its interface an address (ip addr add ADDRESS/24 dev {interface})"
    return "run ibv_devinfo -v (of the package ibverbs-utils), and look into the kernel's log (dmesg)"


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _process_vm_readv() -> str | None:
    """Why this process may not even read itself with that system call, as in a sandbox; None if it may."""
    source, target = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    here, there = (_Iovec(ctypes.addressof(buffer), 8) for buffer in (target, source))
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    vector: list[Any] = [ctypes.POINTER(_Iovec), ctypes.c_ulong]
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    moved = call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return None if moved == 8 else os.strerror(ctypes.get_errno())


# ---- For people ----------------------------------------------------------------------------------------------------


def show(report: Report, console: "Console") -> None:
    """Prints the findings by group, the ports with their GIDs, and the problems last."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    ports = {str(port["name"]): port for port in report.ports}
    for group, title in GROUPS.items():
        console.print(Text(title, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=9)
        table.add_column(width=15)
        table.add_column(overflow="fold")
        for finding in report.findings:
            if finding.group != group:
                continue
            lines = [finding.says]
            if group == "rdma" and finding.name in ports:
                lines += _gid_lines(ports[finding.name])
            if finding.mend and finding.level == "note":
                lines.append(f"To mend it: {finding.mend}")
            level = Text(f"  {finding.level}", style=styles[finding.level])
            table.add_row(level, Text(finding.name), Text("\n".join(lines)))
        console.print(table)
        console.print()
    problems = [finding for finding in report.findings if finding.level == "problem"]
    console.print(Text("Problems" if problems else "No problems", style="bold"))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=25)
    table.add_column(overflow="fold")
    for finding in problems:
        table.add_row(Text(f"  {finding.name}", style=styles["problem"]), Text(finding.says))
        table.add_row("", Text(f"To mend it: {finding.mend}"))
    console.print(table)


def _gid_lines(port: Port) -> list[str]:
    """One line an entry; of a long table the first ones, and the one that would be used."""
    used = port["gid"]["index"] if port["gid"] else None
    entries = [gid for i, gid in enumerate(port["gids"]) if i < MOST_GIDS_SHOWN or gid["index"] == used]
    lines = [
        f"GID {gid['index']}: {gid['address']}, {gid['type']}"
        + (f", {gid['interface']}" if gid["interface"] else "")
        + (" <- used" if gid["index"] == used else "")
        for gid in entries
    ]
    left = len(port["gids"]) - len(entries)
    return [*lines, f"and {left} more GIDs (--json lists all)"] if left else lines
