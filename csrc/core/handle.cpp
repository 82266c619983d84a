#include "core/handle.h"

namespace onesided {
namespace {

constexpr std::uint32_t kHandleMagic = 0x4D48534F;    // "OSHM"
constexpr std::uint32_t kEndpointMagic = 0x4550534F;  // "OSPE"

void check_magic(ByteReader& reader, std::uint32_t magic, const char* what) {
  if (reader.get<std::uint32_t>() != magic) fail(ErrorKind::Handle, "these bytes are not ", what, " of onesided");
  if (const auto version = reader.get<std::uint16_t>(); version != kHandleVersion) {
    fail(ErrorKind::Handle, what, " has format version ", version, "; this library reads version ", kHandleVersion);
  }
}

TransportKind checked_kind(std::uint8_t raw) {
  const auto kind = static_cast<TransportKind>(raw);
  if (kind != TransportKind::Shm && kind != TransportKind::Rdma && kind != TransportKind::Tcp) {
    fail(ErrorKind::Handle, "unknown transport kind ", unsigned{raw});
  }
  return kind;
}

}  // namespace

const char* name_of(TransportKind kind) {
  switch (kind) {
    case TransportKind::Shm: return "shm";
    case TransportKind::Rdma: return "rdma";
    case TransportKind::Tcp: return "tcp";
  }
  return "unknown";
}

const char* name_of(Access access) {
  static constexpr const char* names[] = {"", "r", "w", "rw"};
  return names[static_cast<unsigned>(access) & 3];
}

Access parse_access(std::string_view letters) {
  if (letters == "r") return Access::Read;
  if (letters == "w") return Access::Write;
  if (letters == "rw") return Access::ReadWrite;
  fail(ErrorKind::Layout, "access must be 'r', 'w' or 'rw', not '", letters, "'");
}

std::string RemoteMemory::to_bytes() const {
  ByteWriter writer;
  writer.put(kHandleMagic);
  writer.put(kHandleVersion);
  writer.put(static_cast<std::uint8_t>(kind));
  writer.put(static_cast<std::uint8_t>(access));
  writer.put(transport);
  writer.put(memory_id);
  writer.put(offset);
  writer.put(nbytes);
  writer.put(signals);
  writer.put(key);
  return std::move(writer).finish();
}

RemoteMemory RemoteMemory::from_bytes(std::string_view bytes) {
  ByteReader reader(bytes, "a handle", kLongestHandle);
  check_magic(reader, kHandleMagic, "a handle");
  RemoteMemory memory{};
  memory.kind = checked_kind(reader.get<std::uint8_t>());
  const auto access = reader.get<std::uint8_t>();
  if (access == 0 || access > 3) fail(ErrorKind::Handle, "a handle permits unknown access ", unsigned{access});
  memory.access = static_cast<Access>(access);
  memory.transport = reader.get_token();
  memory.memory_id = reader.get<std::uint64_t>();
  memory.offset = reader.get<std::uint64_t>();
  memory.nbytes = reader.get<std::uint64_t>();
  memory.signals = reader.get<std::uint32_t>();
  memory.key = reader.get_token();
  reader.finish();
  if (memory.offset + memory.nbytes < memory.offset) fail(ErrorKind::Handle, "a handle's range overflows 64 bits");
  return memory;
}

std::string Endpoint::to_bytes() const {
  ByteWriter writer;
  writer.put(kEndpointMagic);
  writer.put(kHandleVersion);
  writer.put(static_cast<std::uint8_t>(kind));
  writer.put(static_cast<std::uint8_t>(shared));
  writer.put(transport);
  writer.put(host);
  writer.put(endpoint_id);
  writer.put(secret);
  writer.put(pid);
  writer.put(std::string_view(address));
  return std::move(writer).finish();
}

Endpoint Endpoint::from_bytes(std::string_view bytes) {
  ByteReader reader(bytes, "an endpoint", kLongestHandle);
  check_magic(reader, kEndpointMagic, "an endpoint");
  Endpoint endpoint{};
  endpoint.kind = checked_kind(reader.get<std::uint8_t>());
  const auto shared = reader.get<std::uint8_t>();
  if (shared > 1) fail(ErrorKind::Handle, "an endpoint is of unknown use ", unsigned{shared});
  endpoint.shared = shared != 0;
  endpoint.transport = reader.get_token();
  endpoint.host = reader.get_token();
  endpoint.endpoint_id = reader.get<std::uint64_t>();
  endpoint.secret = reader.get_token();
  endpoint.pid = reader.get<std::uint32_t>();
  endpoint.address = reader.get_name();
  reader.finish();
  return endpoint;
}

}  // namespace onesided
