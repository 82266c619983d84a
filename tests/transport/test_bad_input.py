"""Every argument of every method of a transport, wrong in every way: the named error, and nothing is changed."""

import gc
import warnings

import pytest
from harness import Kind, raises
from inputs import Use, bad_tensors, refuses
from onesided.transport import Connection, Memory, Target, View
from pairs import Pair, array, connected, remote

from onesided import LayoutError, RemoteMemory, ShmTransport, Work, open_transport


def uses_of_connection(pair: Pair, there: RemoteMemory) -> list[Use]:
    to_b = pair.to_b
    source, into = bytes(8), bytearray(8)
    both = {"remote": "remote", "offset_bytes": "offset"}
    return [
        Use("write", to_b.write, {"source": source, "remote": there, "signal": 0},
            {"source": "source", **both, "signal": "optional index", "add": "word", "async_op": "flag",
            "timeout_s": "timeout"}),
        Use("write async", to_b.write, {"source": source, "remote": there, "signal": 0, "async_op": True},
            {"source": "source", **both, "signal": "optional index", "add": "word", "timeout_s": "timeout"}),
        Use("read", to_b.read, {"destination": into, "remote": there},
            {"destination": "destination", **both, "async_op": "flag", "timeout_s": "timeout"}),
        Use("signal", to_b.signal, {"remote": there, "index": 0},
            {"remote": "remote", "index": "index", "add": "word", "timeout_s": "timeout"}),
        Use("fetch_add", to_b.fetch_add, {"remote": there, "offset_bytes": 0, "add": 1}, {**both, "add": "word"}),
        Use("compare_swap", to_b.compare_swap, {"remote": there, "offset_bytes": 0, "expected": 99, "desired": 1},
            {**both, "expected": "word", "desired": "word"}),
        Use("flush", to_b.flush, {"remote": there}, {"remote": "remote", "timeout_s": "timeout"}),
        Use("attach", to_b.attach, {"remote": there}, {"remote": "remote", "timeout_s": "timeout"}),
    ]  # fmt: skip


def uses_of_memory(memory: Memory, view: View, there: RemoteMemory) -> list[Use]:
    parts = {"offset_bytes": "offset", "nbytes": "optional size"}
    return [
        Use("Memory.view", memory.view, {}, parts),
        Use("View.view", view.view, {}, parts),
        Use("RemoteMemory.view", there.view, {}, parts),
        Use("Memory.wait_signal", memory.wait_signal, {"index": 0, "at_least": 0},
            {"index": "index", "at_least": "count", "timeout_s": "timeout"}),
        Use("Memory.signal_value", memory.signal_value, {"index": 0}, {"index": "index"}),
        Use("Memory.close", memory.close, {}, {"timeout_s": "timeout"}),
        Use("RemoteMemory.from_bytes", RemoteMemory.from_bytes, {"handle": there.to_bytes()}, {"handle": "bytes"}),
    ]  # fmt: skip


def uses_of_transport(pair: Pair, memory: Memory) -> list[Use]:
    few = {"access": "access", "signals": "few", "max_peers": "few"}
    return [
        Use("allocate", pair.b.allocate, {"nbytes": 8}, {"nbytes": "size", **few}),
        Use("register_memory", pair.b.register_memory, {"buffer": bytearray(8)}, {"buffer": "destination", **few}),
        Use("register_memory to read", pair.b.register_memory, {"buffer": b"8", "access": "r"}, {"buffer": "source"}),
        Use("bind", pair.b.bind, {}, {"shared": "flag"}),
        Use("connect", pair.a.connect, {"endpoint": pair.b.bind(shared=True)},
            {"endpoint": "bytes", "name": "label", "timeout_s": "timeout"}),
        Use("loop_back", pair.b.loop_back, {"memory": memory}, {"memory": "memory", "name": "label"}),
    ]  # fmt: skip


def test_every_argument_of_every_method(kind: Kind, capsys) -> None:
    with connected(kind) as pair:
        memory = pair.b.allocate(64, signals=2)
        array(memory)[:] = 0x5A
        there = remote(memory)

        def untouched() -> bool:
            return (
                bool((array(memory) == 0x5A).all())
                and [memory.signal_value(i) for i in (0, 1)] == [0, 0]
                and not memory.closed
            )

        uses = [
            *uses_of_connection(pair, there),
            *uses_of_memory(memory, memory.view(), there),
            *uses_of_transport(pair, memory),
        ]
        tried = sum(refuses(use, untouched) for use in uses)
        with capsys.disabled():
            print(f"[{tried} bad arguments] ", end="")
        pair.to_b.write(b"works", there)


def test_work(kind: Kind) -> None:
    with connected(kind) as pair:
        memory = pair.b.allocate(8)
        done = pair.to_b.write(b"x", remote(memory))
        pending = pair.to_b.write(b"x", remote(memory), async_op=True)
        for work in (done, pending):
            refuses(Use("wait", work.wait, {}, {"timeout_s": "timeout"}), lambda: True)
            with pytest.raises(TypeError):
                work.done(1)  # type: ignore[call-arg]


def test_tensors(kind: Kind) -> None:
    with connected(kind) as pair, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = pair.b.allocate(1024, signals=1)
        array(memory)[:] = 0x5A
        for what, tensor, errors in bad_tensors():
            for use in (
                lambda t: pair.to_b.write(t, remote(memory), signal=0), lambda t: pair.to_b.read(t, remote(memory)),
                lambda t: pair.to_b.write(t, remote(memory), async_op=True), pair.b.register_memory,
            ):  # fmt: skip
                with raises(errors):
                    use(tensor)
                    raise AssertionError(f"{what} was taken")
            assert (array(memory) == 0x5A).all(), what
        assert memory.signal_value(0) == 0


def test_tensors_without_memory(kind: Kind) -> None:
    """Wrappers of torch that look like tensors: DTensor, fake tensors, tensors whose storage was freed."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with connected(kind) as pair, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = pair.b.allocate(64)
        with FakeTensorMode():
            fake = torch.zeros(4)
        freed = torch.zeros(1000)
        freed.untyped_storage().resize_(0)
        wrapper = torch.Tensor._make_wrapper_subclass(wrapper_class(), (4,), dtype=torch.float32)
        for tensor in (fake, freed, wrapper):
            for use in (lambda t: pair.to_b.write(t, remote(memory)), pair.b.register_memory):
                with pytest.raises((LayoutError, TypeError)):
                    use(tensor)
        assert not array(memory).any()


def wrapper_class() -> type:
    import torch

    class Wrapper(torch.Tensor):
        """As DTensor is made: a tensor without storage of its own."""

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("a wrapper was looked into")

    return Wrapper


def test_dtensor(kind: Kind) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        tensor = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert isinstance(tensor, DTensor)
        with connected(kind) as pair:
            memory = pair.b.allocate(32)
            with pytest.raises((LayoutError, TypeError)):
                pair.to_b.write(tensor, remote(memory))
            with pytest.raises((LayoutError, TypeError)):
                pair.b.register_memory(tensor)
            pair.to_b.write(tensor.to_local(), remote(memory))
            assert (array(memory).view("f4") == 1).all()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("cls", [Memory, View, RemoteMemory, Connection, Target, Work], ids=lambda cls: cls.__name__)
def test_objects_that_were_never_made(kind: Kind, cls: type) -> None:
    """No public class can be made by hand, and an empty object does no harm."""
    with pytest.raises(TypeError):
        cls()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = cls.__new__(cls)
        for name in dir(cls):
            if name in (
                "__new__",
                "__init__",
                "__class__",
                "__init_subclass__",
                "__subclasshook__",
                "__getstate__",
                "__setstate__",
            ):
                continue
            try:
                value = getattr(empty, name)
                if callable(value) and not name.startswith("__"):
                    value()
            except Exception:  # noqa: BLE001  # any error will do; the interpreter must live
                pass
        for use in (memoryview, bytes, len, repr, hash, lambda empty: empty == 5):
            try:
                use(empty)
            except Exception:  # noqa: BLE001
                pass
        with connected(kind) as pair:
            memory = pair.b.allocate(8)
            for use in (
                lambda: pair.to_b.write(empty, remote(memory)), lambda: pair.b.register_memory(empty),
                lambda: pair.b.loop_back(empty), lambda: pair.to_b.attach(empty), lambda: remote(memory) == empty,
                lambda: pair.to_b.write(b"x", empty), lambda: pair.to_b.read(empty, remote(memory)),
            ):  # fmt: skip
                try:
                    use()
                except Exception:  # noqa: BLE001
                    pass
            assert not array(memory).any()
    gc.collect()


def test_an_empty_transport(kind: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        empty = ShmTransport.__new__(ShmTransport)
        for use in (
            lambda: empty.allocate(8),
            empty.bind,
            empty.close,
            empty.describe,
            lambda: empty.kind,
            lambda: repr(empty),
        ):
            try:
                use()
            except Exception:  # noqa: BLE001
                pass
    assert open_transport(kind.name).kind == kind.name
