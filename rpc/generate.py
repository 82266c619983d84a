"""Generates `rpc/v1/control_pb2*.py` from `control.proto`, or checks that they are fresh.

    python -m onesided.rpc.generate            # needs exactly the pinned grpcio-tools, see PINNED
    python -m onesided.rpc.generate --check    # any grpcio-tools will do

Generated code runs with the protobuf and the grpcio that it was generated for and with every later one, so it
is generated with an old release on purpose: what is pinned here is the lower bound in pyproject.toml. To
generate:

    python -m venv /tmp/tools && /tmp/tools/bin/pip install grpcio-tools==1.66.2 'setuptools<80'
    /tmp/tools/bin/python rpc/generate.py
"""

import argparse
import sys
import tempfile
from importlib import metadata
from pathlib import Path

PINNED = "1.66.2"  # of grpcio-tools: protobuf>=5.27.2, grpcio>=1.66.2
FOLDER = Path(__file__).resolve().parent / "v1"
PROTO = "onesided/rpc/v1/control.proto"  # as it is imported, whatever the folder is called
OUTPUTS = ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py")


def protoc(out: Path, *flags: str) -> None:
    """Runs the installed protoc on control.proto, laid out in `out` under the name it is installed by."""
    from grpc_tools import protoc as tool

    source = out / PROTO
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text((FOLDER / "control.proto").read_text())
    if tool.main(["protoc", f"-I{out}", *flags, PROTO]) != 0:
        raise SystemExit("protoc failed on control.proto")


def generate(out: Path) -> dict[str, str]:
    """Returns the text of every generated file by name."""
    protoc(out, f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}")
    return {name: (out / PROTO).with_name(name).read_text() for name in OUTPUTS}


def stale(out: Path) -> list[str]:
    """Returns what is not fresh, in words. With another grpcio-tools than the pinned one the text of the
    generated files differs, so the descriptors are compared, and that every method has its stub."""
    if metadata.version("grpcio-tools") == PINNED:
        return [f"{name} differs" for name, text in generate(out).items() if (FOLDER / name).read_text() != text]
    from google.protobuf import descriptor_pb2, descriptor_pool
    from onesided.rpc.v1 import control_pb2

    protoc(out, f"--descriptor_set_out={out / 'set'}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.FileDescriptorSet.FromString((out / "set").read_bytes())
                           .file[0].SerializeToString())
    wanted, have = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    pool.FindFileByName(PROTO).CopyToProto(wanted)
    control_pb2.DESCRIPTOR.CopyToProto(have)
    found = [] if have == wanted else ["control_pb2.py does not describe control.proto"]
    stubs, types = ((FOLDER / name).read_text() for name in ("control_pb2_grpc.py", "control_pb2.pyi"))
    paths = [f"/{wanted.package}.{service.name}/{method.name}"
             for service in wanted.service for method in service.method]
    found += [f"control_pb2_grpc.py lacks {path}" for path in paths if f"'{path}'" not in stubs]
    found += [f"control_pb2.pyi lacks {message.name}" for message in wanted.message_type
              if f"class {message.name}(" not in types]
    return found


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m onesided.rpc.generate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the committed files are stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as out:
        if check:
            found = stale(Path(out))
            print("\n".join(found) or "generated code is fresh")
            return 1 if found else 0
        if metadata.version("grpcio-tools") != PINNED:
            raise SystemExit(f"generate with grpcio-tools=={PINNED}; {metadata.version('grpcio-tools')} is installed")
        for name, text in generate(Path(out)).items():
            (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
