"""One port of an RDMA device, through pyverbs: its address, its memory regions and its queue pairs."""

import contextlib
import importlib.machinery
import importlib.util
import ipaddress
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

from onesided.errors import OnesidedError, RegistrationError, Unsupported

from .wire import Pair, RailAddress

SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"  # where Debian's python3-pyverbs lies


def load() -> Any:
    """The package pyverbs with the modules that are used here. Unsupported if it cannot be imported."""
    try:
        if "pyverbs" not in sys.modules:
            # This package alone is looked for there: nothing else becomes importable.
            find = importlib.machinery.PathFinder.find_spec
            spec = importlib.util.find_spec("pyverbs") or find("pyverbs", [SYSTEM_PACKAGES])
            if spec is None or spec.loader is None:
                raise ImportError("it is not installed (Debian: python3-pyverbs)")
            package = sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(package)
        handlers, level = logging.root.handlers[:], logging.root.level
        for name in ("addr", "cq", "device", "enums", "mr", "pd", "pyverbs_error", "qp", "wr"):
            importlib.import_module(f"pyverbs.{name}")
        logging.root.handlers[:] = handlers  # it calls logging.basicConfig()
        logging.root.setLevel(level)
    except ImportError as error:
        raise Unsupported(f"pyverbs does not import into Python {sys.version.split()[0]}: {error}") from error
    return sys.modules["pyverbs"]


@contextlib.contextmanager
def told_as(kind: type[OnesidedError], what: str) -> Iterator[None]:
    """Turns errors of pyverbs into ours."""
    try:
        yield
    except load().pyverbs_error.PyverbsError as error:
        raise kind(f"{what}: {error}") from error


class Rail:
    """An open port with its protection domain. close() ends everything made on it."""

    def __init__(self, nic: str = "") -> None:
        """`nic`: "rxe0", "rxe0:1", or "rxe0:1/3" with the index of a GID; "" for the first port that can be used."""
        self.verbs = load()
        name, _, rest = nic.partition(":")
        wanted_port, _, wanted_gid = rest.partition("/")
        with told_as(Unsupported, "there is no RDMA device here"):
            names = sorted(device.name.decode() for device in self.verbs.device.get_device_list())
            refused = [f"there are {names}"]
            for device in names if name == "" else {name} & set(names):
                self.context = self.verbs.device.Context(name=device)
                self.limits = self.context.query_device()
                for port in range(1, self.limits.phys_port_cnt + 1):
                    if wanted_port in ("", str(port)):
                        if not (why := self._take(device, port, wanted_gid)):
                            self.pd = self.verbs.pd.PD(self.context)
                            return
                        refused.append(f"{device}:{port} {why}")
                self.context.close()
        raise Unsupported(f"no RDMA port {nic or 'can be used'}: {'; '.join(refused)}")

    def _take(self, device: str, number: int, wanted_gid: str) -> str:
        """Why this port cannot be used; empty, and its fields set, if it can."""
        enums = self.verbs.enums
        port = self.context.query_port(number)
        if port.state != enums.IBV_PORT_ACTIVE:
            return "is not active"
        self.ethernet = port.link_layer == enums.IBV_LINK_LAYER_ETHERNET
        found = []
        for entry in self.context.query_gid_table(1024):
            gid = ipaddress.IPv6Address(entry.gid_str())
            if entry.port_num == number and wanted_gid in ("", str(entry.gid_index)):
                if wanted_gid or not self.ethernet:
                    found.append((False, False, entry.gid_index, gid))
                elif entry.gid_type == enums.IBV_GID_TYPE_ROCE_V2:
                    found.append((gid.is_link_local, gid.ipv4_mapped is None, entry.gid_index, gid))
        if not found:
            return f"has no GID {wanted_gid}" if wanted_gid else "has no RoCE v2 address"
        link_local, _, self.gid_index, gid = min(found)
        self.name, self.port = f"{device}:{number}", number
        self.address = RailAddress(gid.packed, port.lid, port.active_mtu)
        self.longest_message = min(port.max_msg_sz or 1 << 30, 1 << 30)
        self.host = str(gid.ipv4_mapped or gid) if self.ethernet and not link_local else ""
        return ""

    def register(self, array: Any, access: int) -> Any:
        """A memory region over an array, which the caller keeps."""
        with told_as(RegistrationError, f"registering {array.nbytes} bytes with {self.name} failed (RLIMIT_MEMLOCK?)"):
            return self.verbs.mr.MR(self.pd, array.nbytes, access, address=array.ctypes.data)

    def close(self) -> None:
        """Gives the device back."""
        self.pd.close()
        self.context.close()


class QueuePair:
    """A reliable connection (RC). The passive end stays in RTR and posts nothing: its device answers by itself."""

    def __init__(self, rail: Rail, depth: int = 0) -> None:
        """In INIT. `depth` is how many requests will be under way; 0 for a passive end."""
        self.rail, self.verbs, self.first_packet = rail, rail.verbs, random.getrandbits(24)
        self.reads = min(max(rail.limits.max_qp_rd_atom, 1), 16)
        verbs, enums = rail.verbs, rail.verbs.enums
        with told_as(OnesidedError, f"a queue pair cannot be made on {rail.name}"):
            self.queue = verbs.cq.CQ(rail.context, max(depth, 1))
            cap = verbs.qp.QPCap(max_send_wr=max(depth, 1), max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            attr = verbs.qp.QPInitAttr(enums.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=cap, sq_sig_all=1)
            self.pair = verbs.qp.QP(rail.pd, attr)
            access = enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_ATOMIC
            flags = 0 if depth else access
            self._to("INIT", "PKEY_INDEX PORT ACCESS_FLAGS", port_num=rail.port, qp_access_flags=flags)

    def _to(self, state: str, mask: str, **values: Any) -> None:
        enums = self.verbs.enums
        attr = self.verbs.qp.QPAttr(qp_state=getattr(enums, f"IBV_QPS_{state}"))
        for name, value in values.items():
            setattr(attr, name, value)
        with told_as(OnesidedError, f"queue pair of {self.rail.name} to {state}"):
            self.pair.modify(attr, sum(getattr(enums, f"IBV_QP_{name}") for name in f"STATE {mask}".split()))

    def address(self, local_rail: int, remote_rail: int) -> Any:
        """For the peer."""
        return Pair(local_rail, remote_rail, *self.rail.address, self.pair.qp_num, self.first_packet, self.reads)

    def accept(self, peer: Any) -> None:
        """To RTR: the device answers the peer's requests."""
        rail, addr = self.rail, self.verbs.addr
        gid = addr.GID(ipaddress.IPv6Address(peer.gid).exploded)
        route = addr.GlobalRoute(dgid=gid, sgid_index=rail.gid_index, hop_limit=64)
        # Within a subnet of InfiniBand the LID is enough.
        by_gid = rail.ethernet or peer.gid[:8] != rail.address.gid[:8]
        self._to(
            "RTR",
            "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER",
            ah_attr=addr.AHAttr(dlid=peer.lid, is_global=int(by_gid), port_num=rail.port, gr=route),
            path_mtu=min(rail.address.mtu, peer.mtu),
            dest_qp_num=peer.number,
            rq_psn=peer.first_packet,
            max_dest_rd_atomic=self.reads,
            min_rnr_timer=12,
        )

    def connect(self, peer: Any) -> None:
        """To RTS: requests may be posted. A peer that has vanished is given up after about 0.5 s."""
        self.accept(peer)
        self._to(
            "RTS",
            "TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC",
            timeout=14,
            retry_cnt=6,
            rnr_retry=6,
            sq_psn=self.first_packet,
            max_rd_atomic=min(max(self.rail.limits.max_qp_init_rd_atom, 1), max(peer.reads, 1), 16),
        )

    def close(self) -> None:
        """When this returns it reads no source any more, and nothing of its peer lands through it."""
        with told_as(OnesidedError, f"a queue pair of {self.rail.name} does not close"):
            self.pair.close()
            self.queue.close()
