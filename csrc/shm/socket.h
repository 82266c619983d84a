// The messages between processes of one host, over a Unix socket that keeps message boundaries and carries descriptors.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "core/deadline.h"
#include "core/segment.h"

namespace onesided::shm {

// What the connecting side asks. All messages stay on one host between builds of the same version.
struct Request {
  // GiveUp: the Attach of that request_id was given up; a slot that it got, or will have got, goes back.
  enum class Type : std::uint32_t { Hello = 1, Attach = 2, Detach = 3, GiveUp = 4 };
  static constexpr std::uint32_t kMagic = 0x3153534F;  // "OSS1"

  std::uint32_t magic = kMagic;
  Type type{};
  std::uint64_t request_id = 0;
  std::uint64_t id = 0;    // Hello: the endpoint; Attach and Detach: the memory
  Token token{};           // Hello: the endpoint's secret; Attach: the memory's key
  std::uint32_t slot = 0;  // Detach
  std::uint32_t reserved = 0;
};

// What the listening side answers to Hello and Attach. Attach brings two descriptors, control and data; a private memory
// has no data descriptor.
struct Reply {
  std::uint32_t magic = Request::kMagic;
  std::uint32_t error = 0;  // an ErrorKind and `message`, or 0
  std::uint64_t request_id = 0;
  std::uint64_t nbytes = 0;          // of the memory
  std::uint64_t segment_nbytes = 0;  // what to map; 0 for a private memory
  std::uint64_t segment_offset = 0;  // where the memory begins in it
  std::uint64_t address = 0;         // of a private memory in its owner
  std::uint64_t probe_address = 0;   // where its owner keeps its transport token, to try cross-memory attach on
  std::uint32_t access = 0;
  std::uint32_t slots = 0;
  std::uint32_t slot = 0;
  std::uint32_t signals = 0;
  std::array<char, 256> message{};
};

// Names are in the abstract namespace: nothing in the file system, gone with the process.
Fd listen_on(const std::string& name);
// ConnectionLost if nobody listens there.
Fd connect_to(const std::string& name, const Deadline& deadline);

struct PeerCredentials {
  pid_t pid;  // 0 if the peer is not visible from here
  uid_t uid;
};
PeerCredentials credentials(int socket);

// Sends one message; false if the peer is gone or its queue is full.
template <class Message>
bool send_message(int socket, const Message& message, const std::vector<int>& fds = {});
// Receives one message; false if there is none yet. Throws ConnectionLost at the end of the connection or if it is not a
// message of ours.
template <class Message>
bool receive_message(int socket, Message& message, std::vector<Fd>* fds = nullptr);

bool send_bytes(int socket, const void* bytes, std::size_t nbytes, const std::vector<int>& fds);
bool receive_bytes(int socket, void* bytes, std::size_t nbytes, std::vector<Fd>* fds);
// Waits until there is something to receive, or room to send; false at the deadline.
bool wait_readable(int socket, const Deadline& deadline);
bool wait_writable(int socket, const Deadline& deadline);

template <class Message>
bool send_message(int socket, const Message& message, const std::vector<int>& fds) {
  return send_bytes(socket, &message, sizeof message, fds);
}

template <class Message>
bool receive_message(int socket, Message& message, std::vector<Fd>* fds) {
  if (!receive_bytes(socket, &message, sizeof message, fds)) return false;
  if (message.magic != Request::kMagic) fail(ErrorKind::ConnectionLost, "the peer does not speak this protocol");
  return true;
}

}  // namespace onesided::shm
