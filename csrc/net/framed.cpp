#include "net/framed.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace onesided::net {
namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Numbers only: no name is ever looked up here.
Address parse(const std::string& host, std::uint16_t port) {
  Address address;
  auto& v4 = reinterpret_cast<sockaddr_in&>(address.storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address.storage);
  if (::inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    address.length = sizeof v4;
    return address;
  }
  const auto percent = host.find('%');
  if (::inet_pton(AF_INET6, host.substr(0, percent).c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    if (percent != std::string::npos) v6.sin6_scope_id = ::if_nametoindex(host.c_str() + percent + 1);
    address.length = sizeof v6;
    return address;
  }
  fail(ErrorKind::Handle, "'", host, "' is not an IP address");
}

std::string spelled(const Address& address) {
  char host[INET6_ADDRSTRLEN] = {};
  if (address.storage.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr, host, sizeof host);
    return host;
  }
  ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr, host, sizeof host);
  return host;
}

Fd new_socket(int family) {
  Fd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    fail_errno(ErrorKind::Onesided, errno, "no TCP socket to be had",
               errno == EMFILE ? " (RLIMIT_NOFILE: raise it with ulimit -n)" : "");
  }
  return socket;
}

}  // namespace

void prepare(int socket) {
  const int on = 1, idle_s = 4, between_s = 2, probes = 3, unanswered_ms = 10'000;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

Listener listen_on(const std::string& host) {
  Address address = parse(host, 0);
  Fd socket = new_socket(address.storage.ss_family);
  const int on = 1;
  if (address.storage.ss_family == AF_INET6) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    fail_errno(ErrorKind::Onesided, errno, "cannot listen on ", host);
  }
  ::getsockname(socket.get(), address.get(), &address.length);
  const bool v4 = address.storage.ss_family == AF_INET;
  const std::uint16_t port = ntohs(v4 ? reinterpret_cast<sockaddr_in&>(address.storage).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(address.storage).sin6_port);
  return {std::move(socket), v4 ? text(host, ":", port) : text("[", host, "]:", port)};
}

std::string default_address() {
  // Connecting a datagram socket only picks the route; the address is one reserved for documentation (RFC 5737).
  for (const char* anywhere : {"192.0.2.1", "2001:db8::1"}) {
    Address address = parse(anywhere, 9);
    const Fd socket(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!socket || ::connect(socket.get(), address.get(), address.length) != 0) continue;
    Address own;
    own.length = sizeof own.storage;
    if (::getsockname(socket.get(), own.get(), &own.length) == 0) return spelled(own);
  }
  return "127.0.0.1";
}

Fd connect_to(const std::string& address, const std::string& peer, const Deadline& deadline) {
  const auto colon = address.rfind(':');
  unsigned long port = 0;
  std::string host;
  if (colon != std::string::npos && address.size() - colon <= 6) {
    port = std::strtoul(address.c_str() + colon + 1, nullptr, 10);
    host = address.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  }
  if (port == 0 || port > 65535) fail(ErrorKind::Handle, "an endpoint's address '", address, "' is not one of ours");
  Address to = parse(host, static_cast<std::uint16_t>(port));
  Fd socket = new_socket(to.storage.ss_family);
  const auto refuse = [&](int error) {
    fail_errno(ErrorKind::ConnectionLost, error, "connect: ", peer, " does not listen at ", address,
               " (its process ended, closed its transport, or cannot be reached from here)");
  };
  if (::connect(socket.get(), to.get(), to.length) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) refuse(errno);
    if (!wait_for(socket.get(), POLLOUT, deadline)) {
      fail(ErrorKind::DeadlineExceeded, "connect: ", peer, " does not answer at ", address);
    }
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) refuse(error);
  }
  prepare(socket.get());
  return socket;
}

Fd accept_one(int listener) {
  Fd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) prepare(socket.get());
  return socket;
}

// ---- FramedSocket ---------------------------------------------------------------------------------------------------

bool FramedSocket::send(std::string_view message) {
  std::lock_guard lock(mutex_);
  if (broken_) return false;
  const auto length = static_cast<std::uint32_t>(message.size());
  for (unsigned i = 0; i < 4; ++i) out_.push_back(static_cast<char>(length >> (8 * i)));
  out_.append(message);
  return push();
}

bool FramedSocket::has_rest() const {
  std::lock_guard lock(mutex_);
  return !out_.empty() && !broken_;
}

bool FramedSocket::send_rest() {
  std::lock_guard lock(mutex_);
  return push();
}

// With mutex_ held.
bool FramedSocket::push() {
  std::size_t sent = 0;
  while (sent < out_.size()) {
    const ssize_t count = ::send(socket_.get(), out_.data() + sent, out_.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      sent += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      broken_ = true;
      break;
    }
  }
  out_.erase(0, sent);
  // A peer that is stopped and is told more and more has to go: it would fill this process's memory.
  if (out_.size() > 64 * kLongestFrame) broken_ = true;
  return !broken_;
}

std::optional<std::string> FramedSocket::receive() {
  const auto whole = [&]() -> std::optional<std::string> {
    if (in_.size() < 4) return std::nullopt;
    std::uint32_t length = 0;
    for (unsigned i = 0; i < 4; ++i) length |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(in_[i])) << (8 * i);
    if (length > kLongestFrame) fail(ErrorKind::ConnectionLost, "the peer does not speak this protocol");
    if (in_.size() < 4 + std::size_t{length}) return std::nullopt;
    std::string message = in_.substr(4, length);
    in_.erase(0, 4 + std::size_t{length});
    return message;
  };
  for (;;) {
    if (auto message = whole()) return message;
    char bytes[16384];
    const ssize_t count = ::recv(socket_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (count > 0) {
      in_.append(bytes, static_cast<std::size_t>(count));
    } else if (count == 0) {
      fail(ErrorKind::ConnectionLost, "the connection has ended");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return std::nullopt;
    } else if (errno != EINTR) {
      fail_errno(ErrorKind::ConnectionLost, errno, "the connection has ended");
    }
  }
}

void FramedSocket::shut() {
  ::shutdown(socket_.get(), SHUT_RDWR);
}

}  // namespace onesided::net
