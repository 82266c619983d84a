"""The names of exposed windows: each belongs to one window of this process, and is withdrawn with it."""

import _thread
import contextlib
import logging
import os
import threading
import weakref

from onesided.errors import HandleError, OnesidedError, RemoteAccessError

from .exchange import Catalog
from .fabric import Countdown

__all__ = ["Name"]

log = logging.getLogger("onesided.windows")


class Shelf:
    """The names that windows of this process have in one directory.

    The lock is held over requests, so that a name is not withdrawn in the moment in which another window takes it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.names: dict[str, Name] = {}


_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_shelves: "weakref.WeakKeyDictionary[Catalog, Shelf]" = weakref.WeakKeyDictionary()


def shelf_of(directory: Catalog) -> Shelf:
    with _lock:
        return _shelves.setdefault(directory, Shelf())


class Name:
    """A window's name. It does not hold the window: when that is forgotten without close(), the name goes too."""

    def __init__(self, directory: Catalog, name: str, value: bytes) -> None:
        self._directory = directory
        self._name = name
        self._value = value
        self._pid = os.getpid()
        self._window: weakref.finalize[..., object] | None = None

    def publish(self, window: object, lease_s: float | None, replace: bool) -> None:
        """Makes the name that of `window`. RemoteAccessError if another open one has it, unless `replace`."""
        shelf = shelf_of(self._directory)
        with shelf.lock:
            other = shelf.names.get(self._name)
            if other is not None and other.in_use and not replace:
                raise RemoteAccessError(
                    f"{self._name!r} is the name of another open window of this process; close that one first, or take "
                    f"its name with replace=True"
                )
            finalizer = weakref.finalize(window, self._withdraw_beside)
            finalizer.atexit = False  # the directory says goodbye for all of its entries then
            try:
                self._directory.publish(self._name, self._value, lease_s=lease_s, replace=replace)
            except BaseException:
                finalizer.detach()
                raise
            self._window = finalizer
            shelf.names[self._name] = self

    @property
    def in_use(self) -> bool:
        """True while the window is there, and open."""
        return self._window is not None and self._window.alive

    def withdraw(self, countdown: Countdown) -> None:
        """Takes the name back; a control plane that is away is not waited for longer than the caller wants. The end of
        the lease takes the name away in any case."""
        if self._window is None or self._window.detach() is None:
            return
        work = threading.Thread(target=self._withdraw, daemon=True)
        with contextlib.suppress(RuntimeError):  # no new threads: the interpreter ends
            work.start()
            work.join(countdown.left_s())

    def _withdraw_beside(self) -> None:
        # The garbage collector calls this, at any point of any thread: it must take no lock, nor one of threading.
        if os.getpid() == self._pid:
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(self._withdraw, ())

    def _withdraw(self) -> None:
        shelf = shelf_of(self._directory)
        with shelf.lock:
            if shelf.names.get(self._name) is not self:
                return  # a newer window has it
            del shelf.names[self._name]
            try:
                if self._directory.lookup(self._name).value == self._value:  # another process may have taken it over
                    self._directory.withdraw(self._name)
            except HandleError:
                log.debug("the name %r was gone already", self._name)
            except OnesidedError as error:
                log.warning("the name of window %r could not be withdrawn: %s", self._name, error)
