"""What is registered when, and for how long (cases 19 and 23)."""

import ctypes
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from fake_verbs import Device, FakeVerbs, connected, windows
from harness import pattern, raises, same, wait_until

from onesided import RdmaTransport, RegistrationError, StaleHandle, Window

MIB = 1 << 20


def registered(fake: FakeVerbs) -> int:
    return fake.count("reg_mrs")


def once(fake: FakeVerbs, what: str) -> None:
    """The first put registers the object, once a rail; later ones nothing; its death takes the keys back."""
    with windows(2, MIB) as (near, far):
        source, owner = make(what, MIB)
        fill(source, 1)
        before, alive = registered(fake), fake.live("mrs")
        near.put(source, 1)
        assert registered(fake) == before + 2
        for turn in range(2, 10):
            fill(source, turn)
            near.put(source, 1)
            near.put(source[: MIB // 2], 1)
            near.get(source[MIB // 2 :], 1, MIB // 2)
            assert far.array[0] == far.array[-1] == turn
        near.put(source, 0)
        assert registered(fake) == before + 2
        assert fake.live("mrs") == alive + 2
        dies = weakref.ref(owner)
        del source, owner
        gc.collect()
        assert dies() is None
        assert fake.live("mrs") == alive


def make(what: str, nbytes: int) -> tuple:
    """Something to put, and the object whose life counts."""
    if what == "torch":
        import torch

        storage = torch.zeros(nbytes, dtype=torch.uint8)
        return storage, storage
    array = np.zeros(nbytes, np.uint8)
    return (array, array) if what == "numpy" else (array[:].reshape(-1)[:], array)


def fill(source, value: int) -> None:
    source[:] = value


@pytest.mark.parametrize("what", ["numpy", "view of numpy", "torch"])
def test_the_second_put_of_a_tensor_registers_nothing(alone, what: str) -> None:
    alone(once, what, devices=2)


def small_reads(fake: FakeVerbs) -> None:
    """What lands later lands in the array itself, which is registered once; what lands at once needs nothing."""
    with windows(2, MIB) as (near, far):
        far.array[:] = pattern(MIB)
        landed = np.zeros(8, np.uint8)
        before = registered(fake)
        near.get(landed, 1, 16)
        assert registered(fake) == before
        works = [near.get(landed, 1, 8 * turn, async_op=True) for turn in range(40)]
        for work in works:
            work.wait(20)
        assert registered(fake) == before + 2
        same(landed, far.array[8 * 39 : 8 * 40])


def test_small_reads_register_their_array_once(alone) -> None:
    alone(small_reads, devices=2)


def closed_meanwhile(fake: FakeVerbs) -> None:
    """What a tensor says of its memory may be code of the caller, and may close the very window of the operation."""
    import torch

    for operation in ("put", "get"):
        with windows(2, MIB) as (near, _):

            class Closing(torch.Tensor):
                def untyped_storage(self, near: Window = near) -> torch.UntypedStorage:
                    near.close()
                    gc.collect()
                    return torch.UntypedStorage(1)

            tensor = torch.zeros(MIB, dtype=torch.uint8).as_subclass(Closing)
            with raises(StaleHandle, "closed"):
                getattr(near, operation)(tensor, 1)


def test_a_window_that_its_tensor_closes(alone) -> None:
    alone(closed_meanwhile, devices=1)


class Owner:
    """Memory that tells, when it is freed, how many regions there are."""

    def __init__(self, nbytes: int, told: Callable[[], None]) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)
        self._told = told
        self.__array_interface__ = self._bytes.__array_interface__

    def __del__(self) -> None:
        self._told()


def deregistered_before_its_memory_goes(fake: FakeVerbs) -> None:
    import torch

    seen: list[int] = []
    with windows(2, MIB) as (near, _):
        tensor = torch.from_numpy(np.asarray(Owner(MIB, lambda: seen.append(fake.live("mrs")))))
        before = fake.live("mrs")
        near.put(tensor, 1)
        assert fake.live("mrs") == before + 2
        part = tensor[100:]
        del tensor
        gc.collect()
        near.put(part, 1)
        assert not seen
        assert fake.live("mrs") == before + 2
        del part
        gc.collect()
        assert seen == [before], "its memory was freed while devices had keys for it"


def test_a_tensor_is_deregistered_before_its_memory_is_freed(alone) -> None:
    alone(deregistered_before_its_memory_goes, devices=2)


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_at(address: int | None, nbytes: int) -> int:
    """Anonymous memory, exactly there if an address is given (MAP_FIXED_NOREPLACE)."""
    found = libc.mmap(address, nbytes, 3, 0x22 | (0x100000 if address else 0), -1, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    assert address is None or found == address
    return found


def array_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def mapped_again(fake: FakeVerbs, what: str) -> None:
    """Case 19: the same address is another object's, larger, in the next turn. Each is registered anew."""
    most = 8 * MIB
    address = map_at(None, most)
    with windows(2, most) as (near, far):
        for turn in range(1, 9):
            nbytes = turn * MIB
            libc.munmap(address, most)
            map_at(address, most)
            array = array_at(address, nbytes)
            source: object = array
            if what == "torch":
                import torch

                source = torch.from_numpy(array)
            array[:] = turn
            before = registered(fake)
            near.put(source, 1, signal=0)
            assert registered(fake) > before, f"turn {turn} met the keys of the turn before"
            assert (far.array[:nbytes] == turn).all()
            alive = fake.live("mrs")
            del array, source
            gc.collect()
            assert fake.live("mrs") <= alive


@pytest.mark.parametrize("what", ["numpy", "torch"])
def test_case_19_memory_that_is_mapped_again_at_the_same_address(alone, what: str) -> None:
    alone(mapped_again, what, devices=1)


def resized_storage(fake: FakeVerbs) -> None:
    """A storage that is resized in place keeps its Python object; its old keys must not be used for its new memory."""
    import torch

    with windows(2, 4 * MIB) as (near, far):
        tensor = torch.full((MIB,), 1, dtype=torch.uint8)
        near.put(tensor, 1)
        alive = fake.live("mrs")
        before = registered(fake)
        tensor.untyped_storage().resize_(4 * MIB)
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole.fill_(2)
        near.put(whole, 1)
        assert registered(fake) == before + 1
        assert fake.live("mrs") == alive
        assert (far.array == 2).all()


def test_case_19_a_resized_storage(alone) -> None:
    alone(resized_storage, devices=1)


def freed_and_allocated_again(fake: FakeVerbs) -> None:
    """As FSDP does with its flat parameters: the storage lives on, and often has the same address again."""
    import torch

    # glibc then maps each of these by itself, and unmaps it when it is freed (mallopt(3), M_MMAP_THRESHOLD).
    assert ctypes.CDLL(None).mallopt(-3, 65536) == 1
    same_address = 0
    with windows(2, 4 * MIB) as (near, far):
        for nbytes in (100_000, MIB, 4 * MIB):
            tensor = torch.full((nbytes,), 1, dtype=torch.uint8)
            storage = tensor.untyped_storage()
            near.put(tensor, 1)
            alive = fake.live("mrs")
            for turn in range(2, 12):
                before, address = registered(fake), tensor.data_ptr()
                storage.resize_(0)
                storage.resize_(nbytes)
                same_address += tensor.data_ptr() == address
                tensor.fill_(turn)
                near.put(tensor, 1)
                # What fits the heap has the same pages as before, which are registered already.
                assert registered(fake) == before + 1 or (nbytes < 4 * MIB and registered(fake) == before)
                assert fake.live("mrs") == alive
                assert (far.array[:nbytes] == turn).all()
    assert same_address > 0


def test_case_19_a_storage_that_is_freed_and_allocated_again(alone) -> None:
    alone(freed_and_allocated_again, devices=1)


def not_to_be_marked(fake: FakeVerbs) -> None:
    """Where pages cannot be locked, a change of them would not be noticed: storages are registered each time."""
    import resource

    import torch

    with windows(2, MIB) as (near, far):
        tensor = torch.zeros(MIB, dtype=torch.uint8)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        drop_lock_capability()
        alive = fake.live("mrs")
        for turn in range(1, 4):
            tensor.fill_(turn)
            before = registered(fake)
            near.put(tensor, 1)
            assert registered(fake) == before + 1
            assert fake.live("mrs") == alive
            assert (far.array == turn).all()


def drop_lock_capability() -> None:
    """Takes CAP_IPC_LOCK from this thread, if it has it (capset(2), version 3)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 14)
    assert libc.capset(header, data) == 0


def test_storages_that_cannot_be_marked_are_not_kept(alone) -> None:
    alone(not_to_be_marked, devices=1)


def resized_bytearray(fake: FakeVerbs) -> None:
    """A bytearray cannot be watched: it is registered for each operation, and only for as long."""
    with windows(2, 4 * MIB) as (near, far):
        source = bytearray(b"1" * MIB)
        alive = fake.live("mrs")
        for turn in range(1, 5):
            before = registered(fake)
            near.put(source, 1)
            assert registered(fake) == before + 1
            assert fake.live("mrs") == alive
            same(far.array[: len(source)], source)
            source.extend(bytes([turn]) * (MIB if turn < 4 else 0))  # refused if it were still exported


def test_case_19_a_resized_bytearray(alone) -> None:
    alone(resized_bytearray, devices=1)


def in_pieces(fake: FakeVerbs) -> None:
    """Case 23: 1 MiB at most a region: memory and sources are registered in pieces, and used across their borders."""
    nbytes = 8 * MIB + 12_345
    with windows(2, nbytes) as (near, far):
        source = pattern(nbytes)
        before = registered(fake)
        near.put(source, 1, signal=0)
        assert registered(fake) == before + 2 * 9
        far.wait_signal(0, 1, timeout_s=20)
        same(far.array, source)
        landing = np.zeros(nbytes, np.uint8)
        near.get(landing, 1)
        same(landing, source)
        for border in range(MIB, nbytes, MIB):
            near.put(b"across the border", 1, border - 8, signal=1)
            near.get(landing[: min(MIB + 2, nbytes - border + 1)], 1, border - 1)
            assert bytes(landing[:10]) == bytes(far.array[border - 1 : border + 9])
            assert near.fetch_add(1, border - 8, 0) == int.from_bytes(b"across t", "little")
        assert far.wait_signal(1, 8, timeout_s=20) == 8


def test_case_23_one_mebibyte_a_region(alone) -> None:
    alone(in_pieces, devices=[Device(f"fake{i}", limits={"max_mr_size": MIB}) for i in range(2)])


def thirty_two(fake: FakeVerbs) -> None:
    """Case 23: 32 regions at most: the error names the limit, nothing is left of what failed, the rest goes on."""
    with connected(MIB) as pair:
        memories = []
        with raises(RegistrationError, "max_mr of fake0 is 32"):
            while True:
                memories.append(pair.b.allocate(MIB))
        assert 10 <= len(memories) <= 16  # two regions each: the signals have their own
        assert fake.live("mrs") <= 32
        source = np.full(MIB, 7, np.uint8)
        pair.connection.write(source[:4096], pair.remote, signal=0)
        assert (pair.array[:4096] == 7).all()
        left = 32 - fake.live("mrs")
        if left == 0:
            with raises(RegistrationError, "max_mr"):
                pair.connection.write(source, pair.remote)
        for memory in memories:
            memory.close()
        pair.connection.write(source, pair.remote, signal=0)
        assert (pair.array == 7).all()


def test_case_23_thirty_two_regions(alone) -> None:
    alone(thirty_two, devices=[Device("fake0", limits={"max_mr": 32})])


def locked(fake: FakeVerbs) -> None:
    """Case 23: the device or the system takes no more; every step that registers says which limit that can be."""
    with connected(MIB) as pair:
        source, landing = np.full(MIB, 7, np.uint8), np.zeros(MIB, np.uint8)
        alive = fake.live("mrs")
        for error, says in ((12, "RLIMIT_MEMLOCK"), (1, "RLIMIT_MEMLOCK"), (22, "max_mr_size"), (14, "not mapped")):
            for nth in (1, 2, 3, 4):
                fake.fail("reg_mr", error, nth=nth)
                with raises(RegistrationError, says) as _:
                    pair.b.allocate(MIB)
                assert fake.live("mrs") == alive
            if error != 14:
                for use in (
                    lambda: pair.connection.write(source, pair.remote),
                    lambda: pair.connection.write(source, pair.remote, async_op=True),
                    lambda: pair.connection.read(landing, pair.remote),
                ):
                    # Twice: the whole object, then only what is needed of it.
                    fake.fail("reg_mr", error, times=2)
                    with raises(RegistrationError, says):
                        use()
                    assert fake.live("mrs") == alive
        pair.connection.write(source, pair.remote, signal=0)
        assert (pair.array == 7).all()
        assert pair.memory.signal_value(0) == 1


def test_case_23_every_refusal_names_its_limit(alone) -> None:
    alone(locked, devices=2)


def read_only(fake: FakeVerbs) -> None:
    """Shared memory that is read-only cannot be registered on older kernels (EFAULT): it is sent by copies."""
    with connected(MIB) as pair:
        source = pattern(MIB)
        alive = fake.live("mrs")
        fake.fail("reg_mr", 14, times=2)
        pair.connection.write(source, pair.remote, signal=0)
        pair.memory.wait_signal(0, 1, timeout_s=20)
        same(pair.array, source)
        assert fake.live("mrs") == alive


def test_what_cannot_be_registered_is_copied(alone) -> None:
    alone(read_only, devices=1)


def by_view(fake: FakeVerbs) -> None:
    """A view of a transport's own memory, and whatever shows the same bytes, needs no key of its own."""
    with connected(MIB) as pair:
        own = pair.a.allocate(MIB)
        np.frombuffer(own, np.uint8)[:] = 9
        before = registered(fake)
        for source in (own, own.view(0, MIB // 2), memoryview(own), np.frombuffer(own, np.uint8)[100:]):
            pair.connection.write(source, pair.remote)
            pair.connection.read(own.view(0, 100_000), pair.remote)
        assert registered(fake) == before
        assert (pair.array[: MIB // 2] == 9).all()


def test_registered_memory_is_not_registered_again(alone) -> None:
    alone(by_view, devices=2)


def small_transport(fake: FakeVerbs) -> None:
    """A transport that cannot be had leaves nothing: whatever step of it fails."""
    said: list[str] = []
    for call in ("open_device", "alloc_pd", "create_comp_channel", "create_cq", "create_qp", "modify_qp", "reg_mr"):
        for nth in range(1, 6):
            fake.fail(call, 12, nth=nth)
            try:
                with connected(4096) as pair:
                    pair.connection.write(b"it works", pair.remote, signal=0)
                    assert bytes(pair.array[:8]) == b"it works"
            except Exception as error:  # noqa: BLE001
                said.append(str(error))
            fake.fail(call, 12, times=0)
            pair = None
            wait_until(lambda: not fake.alive(), f"nothing is left after the {nth}. {call} failed", 5)
    assert len(said) > 15
    assert all("annot allocate memory" in message or "fake" in message for message in said), said


def test_whatever_step_fails_nothing_is_left(alone) -> None:
    alone(small_transport, devices=2)


def closed_transport(fake: FakeVerbs) -> None:
    """close() gives back what is at the devices, though the objects live."""
    pair_of = []
    with connected(MIB) as pair:
        pair_of.append(pair)
        work = pair.connection.write(np.zeros(MIB, np.uint8), pair.remote, async_op=True)
        work.wait(20)
        loop = RdmaTransport()
        loop.close()
        pair_of += [work, loop]
    left = fake.alive()
    assert not {"qps", "cqs", "channels", "mrs"} & set(left), left


def test_a_closed_transport_has_given_all_back(alone) -> None:
    alone(closed_transport, devices=2)


def generations(fake: FakeVerbs) -> None:
    """Generations that have ended hold nothing at the device."""
    with connected(MIB) as pair:
        alive = None
        for _ in range(4):
            fake.fail_completion(12)  # retries exceeded
            with raises(Exception, "no answer"):
                pair.connection.write(np.zeros(MIB, np.uint8), pair.remote)
            pair.connection.write(b"x", pair.remote, timeout_s=20)
            alive = alive or fake.live("mrs")
        assert fake.live("mrs") == alive


def test_generations_do_not_pile_up(alone) -> None:
    alone(generations, devices=1)
