"""The generated code is what control.proto says, and importing costs no more than it must."""

import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)


def test_generated_code_is_fresh() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    done = run("-m", "onesided.rpc.generate", "--check")
    assert (done.returncode, done.stdout) == (0, "generated code is fresh\n"), done.stderr


def test_generated_code_imports_without_a_warning() -> None:
    done = run("-W", "error", "-c", "import onesided.rpc.v1.control_pb2_grpc")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_room_loads_neither_grpc_nor_torch() -> None:
    heavy = {"grpc", "torch", "google.protobuf", "asyncio", "numpy"}
    done = run("-c", f"import onesided.rpc, sys; print({heavy} & set(sys.modules))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


def test_a_server_and_a_client_need_no_torch() -> None:
    done = run(
        "-c",
        """
import sys
sys.modules['torch'] = None
from onesided.rpc import Group, Server
with Server() as server, Group.join(server.address, 'g', 1) as group:
    print(group.all_gather(b'x'))
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[b'x']\n", "")


def test_every_public_name_is_there() -> None:
    import onesided.rpc

    for name in onesided.rpc.__all__:
        assert getattr(onesided.rpc, name).__doc__
    with pytest.raises(AttributeError, match="nothing"):
        _ = onesided.rpc.nothing
