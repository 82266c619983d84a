"""RDMA over libibverbs: peers that a verbs device reaches (InfiniBand, RoCE, Soft-RoCE)."""

import logging
import os
from collections.abc import Sequence

from onesided import _core
from onesided.errors import Unsupported

from .opened import close_at_exit

__all__ = ["RdmaTransport", "nics_of_environment"]

log = logging.getLogger("onesided.transport")


def nics_of_environment() -> list[str]:
    """The entries of ONESIDED_NICS; none if it is not set."""
    return [name.strip() for name in os.environ.get("ONESIDED_NICS", "").split(",") if name.strip()]


class RdmaTransport(_core.RdmaTransport):
    """The transport for peers that a verbs device reaches.

    The devices move the bytes, straight from and into registered memory, over one reliable connection (RC queue pair) a
    rail and direction; no code runs at the target, and its process may even be stopped. Memory is registered once: by
    allocate() and register_memory(), and for sources and destinations of more than 4 KiB as long as their tensor or
    array lives. Smaller payloads are copied when they are put.

    A thread answers peers that connect or open a memory, over TCP, and hears of their end; no payload passes through
    it.

    Parameters
    ----------
    device
        Where the memory is that will be registered. "cpu" in this version.
    nics
        Which ports to use: "mlx5_0", "mlx5_0:1", "mlx5_0:1/3" with the index of a GID, "mlx5_0:1/10.0.0.7" with the GID
        itself. None takes the environment variable ONESIDED_NICS (with commas), and without that all ports that are as
        good as the best one; describe() tells which, and why.
    address
        Where peers introduce themselves (an IP address of this host). "" takes the environment variable
        ONESIDED_RDMA_ADDRESS, and without that the address behind the first rail's GID, or, if that is none, the one
        from which this host reaches others.
    depth
        Operations under way on one queue pair; who issues more waits.
    timeout, retries
        How soon a peer shows that does not answer any more: a packet is sent again after 4.096 µs * 2**timeout,
        `retries` times (0 to 6). The defaults are about half a second; the end of the peer's process shows at once in
        any case. Lower values take a short congestion for the end.
    mtu
        256 to 4096 bytes a packet; 0 takes what the ports of both ends have.
    traffic_class, service_level
        Of the packets, for networks that sort by them.

    Raises Unsupported, naming every port and what is wrong with it, if none can be used. After a fork, the child's
    first use raises OnesidedError.
    """

    def __init__(
        self,
        device: str = "cpu",
        nics: Sequence[str] | None = None,
        *,
        address: str = "",
        depth: int = 512,
        timeout: int = 14,
        retries: int = 6,
        mtu: int = 0,
        traffic_class: int = 0,
        service_level: int = 0,
        why: str = "made by the program",
    ) -> None:
        if device != "cpu":
            raise Unsupported(f"memory of device {device!r} cannot be registered yet: use device='cpu'")
        if nics is not None and (isinstance(nics, str) or not isinstance(nics, Sequence)):
            raise TypeError(f"nics must be a list of names, not {nics!r}")
        super().__init__(
            nics=nics_of_environment() if nics is None else list(nics),
            address=address or os.environ.get("ONESIDED_RDMA_ADDRESS", ""),
            depth=depth,
            timeout=timeout,
            retries=retries,
            mtu=mtu,
            traffic_class=traffic_class,
            service_level=service_level,
        )
        self._why = why
        close_at_exit(self)
        rails = [text for name, text in super().describe().items() if name.startswith("rail")]
        log.info("rdma transport opened: %s", "; ".join(rails))

    @staticmethod
    def unsupported_reason() -> str | None:
        """Why there can be none here, with the ports that ONESIDED_NICS names if it is set; None if there can."""
        return _core.rdma_unsupported_reason(nics_of_environment())

    @classmethod
    def supported(cls) -> bool:
        """Whether there is a port that can be used. Cheap, and changes nothing."""
        return cls.unsupported_reason() is None

    def describe(self) -> dict[str, str]:
        """Its kind and why it was chosen, its rails and why they were, its state, and what it holds."""
        return {**super().describe(), "why": self._why}

    def __enter__(self) -> "RdmaTransport":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
