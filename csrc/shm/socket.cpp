#include "shm/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/event.h"
#include "core/process.h"

namespace onesided::shm {
namespace {

constexpr int kMostFds = 2;

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof address.sun_path) {
    fail(ErrorKind::Handle, "an endpoint's address of ", name.size(), " bytes is not one of ours");
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // the leading zero byte means: abstract
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

Fd new_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    fail_errno(ErrorKind::Onesided, errno, "no Unix socket to be had",
               errno == EMFILE ? " (RLIMIT_NOFILE: raise it with ulimit -n)" : "");
  }
  return socket;
}

}  // namespace

Fd listen_on(const std::string& name) {
  Fd socket = new_socket();
  const auto [address, length] = abstract_address(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    fail_errno(ErrorKind::Onesided, errno, "cannot listen on the abstract Unix socket '", name, "'");
  }
  return socket;
}

Fd connect_to(const std::string& name, const Deadline& deadline) {
  Fd socket = new_socket();
  const auto [address, length] = abstract_address(name);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EAGAIN) {  // the listener's queue is full: it is asked again shortly
      if (deadline.passed()) fail(ErrorKind::DeadlineExceeded, "connect: the peer accepts no connections in time");
      ::poll(nullptr, 0, 5);
    } else if (errno != EINTR) {
      fail_errno(ErrorKind::ConnectionLost, errno, "connect: nobody listens at the peer's endpoint '", name,
                 "' (the process ended, closed its transport, or runs in another network namespace)");
    }
    check_interrupt();
  }
  return socket;
}

PeerCredentials credentials(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    fail_errno(ErrorKind::ConnectionLost, errno, "the peer's credentials are not to be had");
  }
  return {peer.pid, peer.uid};
}

bool send_bytes(int socket, const void* bytes, std::size_t nbytes, const std::vector<int>& fds) {
  iovec part{const_cast<void*>(bytes), nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(nbytes);
}

bool receive_bytes(int socket, void* bytes, std::size_t nbytes, std::vector<Fd>* fds) {
  iovec part{bytes, nbytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      Fd owned(fd);  // closed here if nobody asked for descriptors
      if (fds != nullptr) fds->push_back(std::move(owned));
    }
  }
  if (got < 0) fail_errno(ErrorKind::ConnectionLost, errno, "receiving from the peer failed");
  if (got == 0) fail(ErrorKind::ConnectionLost, "the peer closed the connection");
  if (got != static_cast<ssize_t>(nbytes) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0)
    fail(ErrorKind::ConnectionLost, "the peer does not speak this protocol");
  return true;
}

bool wait_readable(int socket, const Deadline& deadline) {
  return wait_for(socket, POLLIN, deadline);
}

bool wait_writable(int socket, const Deadline& deadline) {
  return wait_for(socket, POLLOUT, deadline);
}

}  // namespace onesided::shm
