"""The server: where it listens, what it serves, and how it ends."""

import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
from onesided.rpc import Directory, Group, Server
from onesided.rpc.limits import MAX_MESSAGE_BYTES
from onesided.rpc.v1 import control_pb2 as pb
from onesided.rpc.v1 import control_pb2_grpc as pb_grpc

from onesided.errors import BoundsError, ConnectionLost, OnesidedError, StaleHandle, Unsupported


def ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not ipv6_loopback(), reason="this machine has no ::1")


def listening() -> set[tuple[str, int]]:
    """The addresses that this process listens on, by the system's own account."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                # Bound to a mapped IPv4 address, a socket of IPv6 hears that very address.
                found.add((socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:"), int(port, 16)))
    return found


@pytest.fixture
def channel(server: Server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def test_it_listens_where_it_was_told_and_nowhere_else() -> None:
    before = listening()
    with Server() as server:
        host, port = server.address.rsplit(":", 1)
        assert host == "127.0.0.1"
        assert listening() - before == {("127.0.0.1", int(port))}
        with Server(f"127.0.0.2:{port}") as other:
            assert other.address == f"127.0.0.2:{port}"
            assert listening() - before == {("127.0.0.1", int(port)), ("127.0.0.2", int(port))}
    assert listening() == before


def test_a_host_name_means_one_address() -> None:
    before = listening()
    with Server("localhost:0") as server:
        assert listening() - before == {("127.0.0.1", int(server.address.rsplit(":", 1)[1]))}


@needs_ipv6
def test_ipv6() -> None:
    before = listening()
    with Server("[::1]:0") as server:
        assert server.address.startswith("[::1]:")
        assert listening() - before == {("::1", int(server.address.rsplit(":", 1)[1]))}
        with Group.join(server.address, "g", 1) as group:
            assert group.all_gather(b"6") == [b"6"]
        with Directory(server.address) as directory:
            assert directory.publish("n", b"").version == 1


def test_a_port_in_use_is_named(server: Server) -> None:
    with pytest.raises(OnesidedError, match=f"cannot listen at {server.address}: Address already in use"):
        Server(server.address)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OnesidedError, match=f":{port}: Address already in use"):
            Server(f"127.0.0.1:{port}")


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(OnesidedError, match=r"cannot listen at 192\.0\.2\.1:4000: Cannot assign requested address"):
        Server("192.0.2.1:4000")
    with pytest.raises(OnesidedError, match=r"cannot listen at 192\.0\.2\.1:0: Cannot assign requested address"):
        Server("192.0.2.1:0")
    with pytest.raises(OnesidedError, match="no-such-host"):
        Server("no-such-host.invalid:0")


@pytest.mark.parametrize("bind", ["", "127.0.0.1", "::1:0", "127.0.0.1:x", "127.0.0.1:70000"])
def test_what_is_no_address(bind: str) -> None:
    with pytest.raises(BoundsError, match="port"):
        Server(bind)


def test_a_port_is_free_again_once_closed() -> None:
    server = Server()
    for _ in range(5):
        with Directory(server.address) as directory:
            directory.publish("n", b"")
            server.close()
            server = Server(server.address)
    server.close()


def test_64_servers_of_16_processes_at_once(spawn) -> None:
    children = [
        spawn("""
        servers = [Server() for _ in range(4)]
        say("at", *(server.address for server in servers))
        sys.stdin.read()
        for server in servers: server.close()
    """)
        for _ in range(16)
    ]
    addresses = [address for child in children for address in child.said("at").split()]
    assert len(set(addresses)) == 64
    for address in addresses[::7]:
        with Directory(address) as directory:
            assert directory.publish("n", b"").version == 1
    for child in children:
        child.process.stdin.close()
        child.process.stdin = None
    for child in children:
        assert child.end() == 0
        assert child.errors == ""


def test_health_is_the_standard_service(channel: grpc.Channel) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "onesided.v1.Control", "onesided.v1.Directory"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=30)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_reflection_is_the_standard_service(channel: grpc.Channel) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=30)
    assert {service.name for service in answer.list_services_response.service} == {
        "onesided.v1.Control",
        "onesided.v1.Directory",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="onesided.v1.Directory")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=30)
    assert answer.file_descriptor_response.file_descriptor_proto == [pb.DESCRIPTOR.serialized_pb]


def test_messages_are_bounded(channel: grpc.Channel, directory: Directory) -> None:
    stub = pb_grpc.DirectoryStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Publish(pb.PublishRequest(client_id="c", name="n", value=bytes(MAX_MESSAGE_BYTES + 1)), timeout=30)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert directory.list() == []


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        ("Join", pb.JoinRequest(), "OUT_OF_RANGE", "client id"),
        ("Join", pb.JoinRequest(client_id="c", group="g", size=0, lease_s=1), "OUT_OF_RANGE", "group size is 0"),
        ("Join", pb.JoinRequest(client_id="c", group="g", size=1 << 31, lease_s=1), "OUT_OF_RANGE", "group size"),
        ("Join", pb.JoinRequest(client_id="c", group="g", size=2, rank=2, lease_s=1), "OUT_OF_RANGE", "rank"),
        ("Join", pb.JoinRequest(client_id="c", group="g", size=2, lease_s=float("nan")), "OUT_OF_RANGE", "lease_s"),
        ("Join", pb.JoinRequest(client_id="c", group="g", size=2, lease_s=float("inf")), "OUT_OF_RANGE", "lease_s"),
        ("Join", pb.JoinRequest(client_id="c", group="g", size=2, lease_s=1), "DEADLINE_EXCEEDED", "1 of 2 members"),
        ("Resume", pb.ResumeRequest(client_id="c", group="g", size=0, lease_s=1), "OUT_OF_RANGE", "group size"),
        ("Resume", pb.ResumeRequest(client_id="c", group="g", size=1, rank=1, lease_s=1), "OUT_OF_RANGE", "rank"),
        ("Heartbeat", pb.HeartbeatRequest(client_id="c", member=True), "DATA_LOSS", "does not know c"),
        ("AllGather", pb.AllGatherRequest(client_id="c", sequence=1), "DATA_LOSS", "does not know c"),
        ("AllGather", pb.AllGatherRequest(client_id="c", timeout_s=-1), "OUT_OF_RANGE", "timeout_s"),
        ("Publish", pb.PublishRequest(client_id="c", name="n", lease_s=-1), "OUT_OF_RANGE", "lease_s"),
        ("Publish", pb.PublishRequest(client_id="c", lease_s=1), "OUT_OF_RANGE", "entry name"),
        ("Publish", pb.PublishRequest(name="n", lease_s=1), "OUT_OF_RANGE", "client id"),
        ("Lookup", pb.LookupRequest(name="n"), "NOT_FOUND", "nothing is published as 'n'"),
        ("Lookup", pb.LookupRequest(name="n", timeout_s=float("nan")), "OUT_OF_RANGE", "timeout_s"),
        ("Withdraw", pb.WithdrawRequest(client_id="c"), "OUT_OF_RANGE", "entry name"),
        ("List", pb.ListRequest(prefix="x" * 256), "OUT_OF_RANGE", "prefix"),
    ],
)
def test_any_request_gets_an_answer_of_the_table(channel: grpc.Channel, method, request_, code, text) -> None:
    stubs = vars(pb_grpc.ControlStub(channel)) | vars(pb_grpc.DirectoryStub(channel))
    with pytest.raises(grpc.RpcError, match=text) as caught:
        stubs[method](request_, timeout=30)
    assert caught.value.code().name == code


def test_a_watch_with_a_prefix_that_cannot_be(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError, match="prefix has 256 bytes"):
        next(pb_grpc.DirectoryStub(channel).Watch(pb.WatchRequest(prefix="x" * 256), timeout=30))


def test_something_else_at_the_address() -> None:
    other = grpc.server(__import__("concurrent.futures").futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        with pytest.raises(Unsupported, match=f"the control plane at 127.0.0.1:{port}: "):
            Group.join(f"127.0.0.1:{port}", "g", 1, timeout_s=20)
        with Directory(f"127.0.0.1:{port}") as directory:
            with pytest.raises(Unsupported):
                directory.watch().next(timeout_s=20)
    finally:
        other.stop(None).wait()


def test_close_is_idempotent_and_ends_waiting_calls(server: Server) -> None:
    """Clients take it for an outage: they wait for the next server until their own deadline."""
    outcomes: list[Exception] = []

    def join() -> None:
        try:
            Group.join(server.address, "g", 2, timeout_s=6)
        except OnesidedError as error:
            outcomes.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    while server._host.state.members._groups == {}:
        time.sleep(0.005)
    begun_s = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - begun_s < 5
    assert server.closed
    thread.join(20)
    assert "no answer from the control plane" in str(outcomes[0])
    with pytest.raises(StaleHandle):
        _ = server.members


def test_servers_are_independent(server: Server) -> None:
    with Server() as other, Directory(server.address) as here, Directory(other.address) as there:
        here.publish("n", b"")
        assert there.list() == []
        assert str(server.address) in repr(server)


def test_members_are_counted(server: Server, joined, eventually) -> None:
    assert server.members == 0
    groups = joined(3)
    assert server.members == 3
    groups[0].leave()
    assert server.members == 2


def test_tls(tmp_path: Path) -> None:
    import shutil
    import subprocess

    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    key, cert = (tmp_path / "key.pem").read_bytes(), (tmp_path / "cert.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([(key, cert)], root_certificates=cert, require_client_auth=True)
    client = grpc.ssl_channel_credentials(root_certificates=cert, private_key=key, certificate_chain=cert)
    with Server(credentials=credentials) as server:
        with Group.join(server.address, "g", 1, credentials=client) as group:
            assert group.all_gather(b"secret") == [b"secret"]
        with Directory(server.address, credentials=client) as directory:
            assert directory.publish("n", b"").version == 1
        with pytest.raises(TimeoutError, match="no answer"):
            Group.join(server.address, "g", 1, timeout_s=0.5)


def test_a_closed_server_is_an_outage_not_a_loss(server: Server, monkeypatch) -> None:
    from onesided.rpc import client

    monkeypatch.setattr(client, "REPLY_S", 0.1)
    with Directory(server.address) as directory:
        directory.publish("n", b"")
        server.close()
        with pytest.raises(ConnectionLost):
            directory.lookup("n")
