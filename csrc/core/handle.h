// The two byte strings that peers exchange: a memory's handle and a connection's endpoint.
//
// Both are little-endian, versioned, bounded and closed by a CRC-32. Reading never allocates by a length field and ends
// every bad string in a HandleError. ARCHITECTURE.md has the layouts as tables.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/bytes.h"

namespace onesided {

inline constexpr std::uint16_t kHandleVersion = 1;
inline constexpr std::size_t kLongestHandle = 1024;

enum class TransportKind : std::uint8_t { Shm = 1, Rdma = 2, Tcp = 3 };
const char* name_of(TransportKind kind);

// What peers may do with a memory. Signals need no permission: whoever can reach the memory may signal.
enum class Access : std::uint8_t { None = 0, Read = 1, Write = 2, ReadWrite = 3 };
Access parse_access(std::string_view letters);  // "r", "w" or "rw", else LayoutError
const char* name_of(Access access);
inline bool permits(Access given, Access wanted) {
  return (static_cast<unsigned>(given) & static_cast<unsigned>(wanted)) == static_cast<unsigned>(wanted);
}

// What a handle describes: a range of a memory at a peer, and the key that opens it.
struct RemoteMemory {
  TransportKind kind;
  Access access;
  Token transport;          // the transport instance that the memory is registered with
  std::uint64_t memory_id;  // never used twice by one transport, so it is the generation, too
  std::uint64_t offset;     // of the described range in the memory
  std::uint64_t nbytes;
  std::uint32_t signals;
  Token key;

  std::string to_bytes() const;
  static RemoteMemory from_bytes(std::string_view bytes);
};

// One side of a connection to be: where it listens and the secret that proves that it was told so.
struct Endpoint {
  TransportKind kind;
  bool shared;  // any number of peers may connect to it; else one
  Token transport;
  Token host;
  std::uint64_t endpoint_id;
  Token secret;
  std::uint32_t pid;  // for messages only
  std::string address;

  std::string to_bytes() const;
  static Endpoint from_bytes(std::string_view bytes);
};

}  // namespace onesided
