// Messages over TCP: a length, then bytes. Non-blocking on both sides; what does not fit the socket waits in a queue here.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "core/deadline.h"
#include "core/fd.h"

namespace onesided::net {

// No message is longer, whatever its length field says.
inline constexpr std::size_t kLongestFrame = 256 << 10;

struct Listener {
  Fd socket;
  std::string address;  // "10.0.0.1:4711", "[fe80::1]:4711": the port that was given
};

// Listens on exactly this address ("10.0.0.1", "::1", no names), on any free port.
Listener listen_on(const std::string& host);
// The source address of a route to the world, or "127.0.0.1" if there is none. Sends nothing.
std::string default_address();
// ConnectionLost if nobody listens there; DeadlineExceeded.
Fd connect_to(const std::string& address, const std::string& peer, const Deadline& deadline);
Fd accept_one(int listener);
// Small messages leave at once, and a peer whose host has vanished is noticed within about ten seconds.
void prepare(int socket);

class FramedSocket {
 public:
  explicit FramedSocket(Fd socket) : socket_(std::move(socket)) {}
  int fd() const { return socket_.get(); }

  // Any thread. False if the peer is gone.
  bool send(std::string_view message);
  // True if bytes wait for room in the socket: then call send_rest() when it is writable.
  bool has_rest() const;
  bool send_rest();
  // One thread. The next whole message, if there is one. Throws ConnectionLost at the end of the stream or when what comes is
  // not in this format.
  std::optional<std::string> receive();
  // Ends it for both directions; the descriptor stays until the object goes.
  void shut();

 private:
  bool push();

  Fd socket_;
  mutable std::mutex mutex_;
  std::string out_;
  std::string in_;
  bool broken_ = false;
};

}  // namespace onesided::net
