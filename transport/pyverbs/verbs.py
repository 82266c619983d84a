"""One port of an RDMA device, through pyverbs: its memory regions, its queue pairs, and work requests on them."""

import contextlib
import importlib.machinery
import importlib.util
import ipaddress
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from onesided import errors

from .wire import Pair, RailAddress

SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"  # where Debian's python3-pyverbs lies
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC = 1, 2, 4, 8  # ibv_access_flags
DEPTH = 16  # work requests under way on a queue pair


def load() -> Any:
    """The package pyverbs with the modules that are used here. Unsupported if it cannot be imported."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
            # This package alone is looked for there: nothing else becomes importable.
            spec = importlib.machinery.PathFinder.find_spec("pyverbs", [SYSTEM_PACKAGES])
            if spec is None:
                raise ImportError("it is not installed (Debian: python3-pyverbs)")
            sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)
        for name in ("addr", "cq", "device", "enums", "mr", "pd", "pyverbs_error", "qp", "wr"):
            importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise errors.Unsupported(f"pyverbs does not import into Python {sys.version.split()[0]}: {error}") from error
    logging.root.handlers[:] = handlers  # it calls logging.basicConfig()
    logging.root.setLevel(level)
    return sys.modules["pyverbs"]


@contextlib.contextmanager
def told_as(kind: type[errors.OnesidedError], what: str) -> Iterator[None]:
    """Turns errors of pyverbs into ours."""
    try:
        yield
    except load().pyverbs_error.PyverbsError as error:
        raise kind(f"{what}: {error}") from error


class Rail:
    """An open port with its protection domain. close() ends everything made on it."""

    @told_as(errors.Unsupported, "there is no RDMA device to use")
    def __init__(self, nic: str = "") -> None:
        """`nic`: "rxe0", "rxe0:1", or "rxe0:1/3" with the index of a GID; "" for the best there is."""
        self.verbs = verbs = load()
        enums, wanted, found = verbs.enums, re.split("[:/]", nic) if nic else [], list[Any]()
        names = [device.name.decode() for device in verbs.device.get_device_list()]
        for name in [name for name in names if wanted[:1] in ([], [name])]:
            with verbs.device.Context(name=name) as context:
                for entry in context.query_gid_table(1024):
                    port, gid = context.query_port(entry.port_num), ipaddress.IPv6Address(entry.gid_str())
                    place = [name, str(entry.port_num), str(entry.gid_index)]
                    usable = wanted == place or entry.gid_type != enums.IBV_GID_TYPE_ROCE_V1
                    if usable and port.state == enums.IBV_PORT_ACTIVE and wanted == place[: len(wanted)]:
                        # Addresses of IPv4 first, those that only the link knows last; else in the order of the system.
                        rank = (gid.is_link_local, gid.ipv4_mapped is None, len(found))
                        found.append((rank, name, entry, gid, port))
        if not found:
            raise errors.Unsupported(f"{nic or 'here'}: no active port with a RoCE v2 address on the devices {names}")
        _, device, entry, gid, port = min(found)
        self.port, self.gid_index, self.name = entry.port_num, entry.gid_index, f"{device}:{entry.port_num}"
        self.address = RailAddress(gid.packed, port.lid, port.active_mtu)
        self.ip = str(gid.ipv4_mapped or "")
        self.ethernet = port.link_layer == enums.IBV_LINK_LAYER_ETHERNET
        self.longest_message = min(port.max_msg_sz or 1 << 30, 1 << 30)
        self.context = verbs.device.Context(name=device)
        self.limits = self.context.query_device()
        self.pd = verbs.pd.PD(self.context)

    def register(self, array: Any, access: int) -> Any:
        """A memory region over an array, which the caller keeps."""
        with told_as(errors.RegistrationError, f"registering {array.nbytes} bytes with {self.name} (RLIMIT_MEMLOCK?)"):
            return self.verbs.mr.MR(self.pd, array.nbytes, access, address=array.ctypes.data)

    def request(self, opcode: str, local: int, nbytes: int, lkey: int, address: int, rkey: int, *operands: int) -> Any:
        """A work request for a queue pair on this port; with operands, an atomic one."""
        wr, code = self.verbs.wr, getattr(self.verbs.enums, f"IBV_WR_{opcode}")
        request = wr.SendWR(opcode=code, num_sge=1, sg=[wr.SGE(local, nbytes, lkey)])
        (request.set_wr_atomic if operands else request.set_wr_rdma)(rkey, address, *operands)
        return request

    def close(self) -> None:
        """Gives the device back."""
        self.context.close()


class QueuePair:
    """A reliable connection (RC). The passive end stays in RTR and posts nothing: its device answers by itself."""

    @told_as(errors.OnesidedError, "a queue pair cannot be made")
    def __init__(self, rail: Rail, *, passive: bool) -> None:
        self.rail, self.passive, self.first_packet = rail, passive, random.getrandbits(24)
        self.reads = min(max(rail.limits.max_qp_rd_atom, 1), 16)
        verbs, enums = rail.verbs, rail.verbs.enums
        self.attr = verbs.qp.QPAttr(port_num=rail.port)
        self.attr.qp_access_flags = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC if passive else 0
        self.queue = verbs.cq.CQ(rail.context, DEPTH)
        cap = verbs.qp.QPCap(max_send_wr=DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = verbs.qp.QPInitAttr(enums.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=cap, sq_sig_all=1)
        self.pair = verbs.qp.QP(rail.pd, init, self.attr)  # in INIT

    def address(self, local_rail: int, remote_rail: int) -> Any:
        """For the peer."""
        return Pair(local_rail, remote_rail, *self.rail.address, self.pair.qp_num, self.first_packet, self.reads)

    @told_as(errors.OnesidedError, "a queue pair does not connect")
    def connect(self, peer: Any) -> None:
        """To RTR: the device answers the peer's requests. The active end goes on to RTS: requests may be posted."""
        rail, attr, addr = self.rail, self.attr, self.rail.verbs.addr
        gid = addr.GID(ipaddress.IPv6Address(peer.gid).exploded)
        route = addr.GlobalRoute(dgid=gid, sgid_index=rail.gid_index, hop_limit=64)
        by_gid = rail.ethernet or peer.gid[:8] != rail.address.gid[:8]  # else the LID is enough: one subnet
        attr.ah_attr = addr.AHAttr(dlid=peer.lid, is_global=int(by_gid), port_num=rail.port, gr=route)
        attr.path_mtu = min(rail.address.mtu, peer.mtu)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer.number, peer.first_packet, self.first_packet
        attr.max_dest_rd_atomic, attr.min_rnr_timer = self.reads, 12
        attr.max_rd_atomic = min(max(rail.limits.max_qp_init_rd_atom, 1), max(peer.reads, 1), 16)
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 6, 6  # a peer that has vanished is given up after 0.5 s
        (self.pair.to_rtr if self.passive else self.pair.to_rts)(attr)

    @told_as(errors.ConnectionLost, "a work request cannot be posted")
    def run(self, what: str, requests: Sequence[Any], until_s: float, check: Callable[[], None]) -> None:
        """Posts work requests, and polls until all are complete at the peer. After any failure, close it.

        `check` raises when there is nothing to wait for any more.
        """
        enums, posted, done = self.rail.verbs.enums, 0, 0
        refusals = (enums.IBV_WC_REM_ACCESS_ERR, enums.IBV_WC_REM_INV_REQ_ERR, enums.IBV_WC_REM_OP_ERR)
        while done < len(requests):
            for request in requests[posted : done + DEPTH]:
                self.pair.post_send(request)
                posted += 1
            count, completions = self.queue.poll(DEPTH)
            done += count
            for completion in completions:
                if completion.status != enums.IBV_WC_SUCCESS:
                    kind = errors.RemoteAccessError if completion.status in refusals else errors.ConnectionLost
                    raise kind(f"{what}: {self.rail.verbs.cq.cqe_status_to_str(completion.status)}")
            if count == 0:
                check()
                if time.monotonic() > until_s:
                    raise errors.DeadlineExceeded(f"{what}: its source is not read again")
                time.sleep(0)

    @told_as(errors.OnesidedError, "a queue pair does not close")
    def close(self) -> None:
        """When this returns it reads no source any more, and nothing of its peer lands through it."""
        self.pair.close()
        self.queue.close()
