// What two rdma transports say to each other over TCP, beside the traffic of their devices. ARCHITECTURE.md has it as tables.
#pragma once

#include "verbs/channel.h"

#if ONESIDED_HAS_VERBS
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/bytes.h"
#include "core/handle.h"

namespace onesided::verbs {

// A memory may have so many regions on all rails together, so that their keys fit one message.
inline constexpr std::size_t kMostKeys = 32768;

enum class Say : std::uint8_t {
  Hello = 1,     // connecting side: the endpoint, its secret
  Welcome = 2,   // the rails of the other side
  Open = 3,      // the queue pairs of a new generation; the former one's end first
  Opened = 4,    // the queue pairs that answer them
  Attach = 5,    // a memory and its key
  Attached = 6,  // where it is, and the keys that the devices want
  Detach = 7,    // the connecting side has done with a memory
  Revoke = 8,    // the owner closes a memory: nothing more may be posted
  Revoked = 9,   // nothing is under way any more
  Failed = 10,   // in place of Welcome, Opened or Attached
  Ended = 11,    // the other side has taken its queue pairs away: the next generation has to be opened
  Renew = 12,    // the owner changes the keys: as Revoke, but the memory may be attached again
};

struct RailAddress {
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;
};

struct PairRequest {
  std::uint8_t local_rail = 0;   // of the connecting side
  std::uint8_t remote_rail = 0;  // of the other
  QueueAddress address;
};

// How a peer reaches a memory.
struct Reach {
  std::uint64_t nbytes = 0;
  Access access{};
  std::uint32_t signals = 0;
  std::uint64_t address = 0;
  std::uint64_t piece_nbytes = 1;
  std::uint64_t words_address = 0;        // 8 bytes to read for a flush, then the signals
  std::vector<std::uint32_t> keys;        // by rail, then by piece
  std::vector<std::uint32_t> words_keys;  // by rail
};

struct Message {
  Say say{};
  std::uint64_t request_id = 0;
  std::uint64_t id = 0;            // Hello: the endpoint; Attach, Detach, Revoke, Revoked, Ended, Renew: the memory
  Token token{};                   // Hello: the secret; Attach: the key
  std::uint32_t pid = 0;           // Hello, for messages
  std::uint32_t generation = 0;    // Open
  std::vector<RailAddress> rails;  // Welcome
  std::vector<PairRequest> pairs;  // Open; Opened: only the addresses count
  Reach reach;                     // Attached
  ErrorKind error{};               // Failed
  std::string text;                // Failed

  std::string to_bytes() const;
  static Message from_bytes(std::string_view bytes);  // HandleError for everything else
};

}  // namespace onesided::verbs
#endif
