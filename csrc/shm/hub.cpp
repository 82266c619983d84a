#include "shm/hub.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/process.h"
#include "shm/connection.h"

namespace onesided::shm {

Token host_token() {
  // boot_id is a UUID as text; the network namespace decides who can see an abstract socket.
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  ::stat("/proc/self/ns/net", &network);
  Token token{};
  for (std::size_t i = 0; i < boot.size(); ++i)
    token[i % token.size()] = static_cast<std::uint8_t>(token[i % token.size()] * 31 + boot[i]);
  for (std::size_t i = 0; i < sizeof network.st_ino; ++i)
    token[i] ^= static_cast<std::uint8_t>(network.st_ino >> (8 * i));
  return token;
}

Hub::Hub()
    : Registry(TransportKind::Shm),
      address_("onesided-" + hex(random_token())),
      listener_(listen_on(address_)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) {
    fail_errno(ErrorKind::Onesided, errno,
               "no descriptors for the transport's thread (RLIMIT_NOFILE: raise it with ulimit -n)");
  }
  add_to_epoll(epoll_.get(), listener_.get(), EPOLLIN);
  add_to_epoll(epoll_.get(), wake_.get(), EPOLLIN);
}

Hub::~Hub() {
  stop();
}

void Hub::start() {
  close_in_forked_child(listener_.get());
  thread_ = start_thread([this] { run(); });
}

void Hub::stop() {
  if (stopped_.exchange(true)) return;
  if (thread_.joinable()) {
    const std::uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof one) != sizeof one) return;
    thread_.join();
  }
  std::lock_guard lock(mutex_);
  forget_in_forked_child(listener_.get());
  listener_.reset();
  for (auto& [fd, peer] : incoming_) forget_in_forked_child(fd);
  incoming_.clear();
}

void Hub::watch(const std::shared_ptr<ShmConnection>& connection, int socket, int pidfd) {
  std::lock_guard lock(mutex_);
  check_not_retired();
  watched_[socket] = connection;
  add_to_epoll(epoll_.get(), socket, EPOLLRDHUP);
  if (pidfd >= 0) {
    watched_[pidfd] = connection;
    add_to_epoll(epoll_.get(), pidfd, EPOLLIN);
  }
}

void Hub::unwatch(int socket, int pidfd) {
  std::lock_guard lock(mutex_);
  for (const int fd : {socket, pidfd}) {
    if (fd >= 0 && watched_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
}

std::vector<std::shared_ptr<ShmConnection>> Hub::connections() {
  std::vector<std::shared_ptr<ShmConnection>> alive;  // outlives the lock: the last to let go of one takes it again
  {
    std::lock_guard lock(mutex_);
    for (auto& [fd, weak] : watched_) {
      if (auto connection = weak.lock()) alive.push_back(std::move(connection));
    }
  }
  // Each may be watched by two descriptors.
  std::sort(alive.begin(), alive.end());
  alive.erase(std::unique(alive.begin(), alive.end()), alive.end());
  return alive;
}

std::string Hub::name_of_holder(int socket) const {
  const auto peer = incoming_.find(socket);
  return peer == incoming_.end() ? "a peer" : text("process ", peer->second.pid);
}

bool Hub::is_held_by(int socket, const std::string& peer) const {
  const auto holder = incoming_.find(socket);
  return holder != incoming_.end() && holder->second.peer == peer;
}

// ---- The thread ---------------------------------------------------------------------------------------------------

void Hub::run() {
  std::array<epoll_event, 64> events;
  while (!stopped()) {
    const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) continue;
      if (fd == listener_.get()) {
        accept_all();
      } else if (incoming_.count(fd) != 0) {
        serve(fd);
      } else {
        check_watched(fd);
      }
    }
  }
}

void Hub::accept_all() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      // Out of descriptors: the peer stays in the queue. The nap keeps this thread from spinning on it.
      if (errno == EMFILE || errno == ENFILE) ::poll(nullptr, 0, 10);
      return;
    }
    try {
      admit(std::move(socket));
    } catch (const Error&) {
      // It is gone already, or there is not enough of something: this connection ends, the others go on.
    }
  }
}

void Hub::admit(Fd socket) {
  const PeerCredentials peer = credentials(socket.get());
  // Memory is for the same user only (and root, who can read it in any case).
  if (peer.uid != ::geteuid() && peer.uid != 0) return;
  const int fd = socket.get();
  add_to_epoll(epoll_.get(), fd, EPOLLIN);
  close_in_forked_child(fd);
  std::lock_guard lock(mutex_);
  Incoming& incoming = incoming_[fd];
  incoming.socket = std::move(socket);
  incoming.pid = peer.pid;
}

void Hub::serve(int socket) {
  Request request;
  try {
    if (!receive_message(socket, request)) return;
  } catch (const Error&) {
    drop(socket);
    return;
  }
  std::vector<int> fds;
  Fd keep_open;
  bool sent = true;
  {
    // Sent with the lock held: until then, the descriptors must be those of a memory that is listed.
    std::lock_guard lock(mutex_);
    const Reply reply = answer(incoming_.at(socket), request, fds, keep_open);
    if (request.type != Request::Type::Detach && request.type != Request::Type::GiveUp)
      sent = send_message(socket, reply, fds);
  }
  if (!sent) drop(socket);
}

// With the lock held.
Reply Hub::answer(Incoming& peer, const Request& request, std::vector<int>& fds, Fd& keep_open) {
  Reply reply;
  reply.request_id = request.request_id;
  try {
    switch (request.type) {
      case Request::Type::Hello:
        peer.peer = greeted(request.id, request.token);
        peer.greeted = true;
        break;
      case Request::Type::Attach: open_memory(peer, request, reply, fds, keep_open); break;
      case Request::Type::Detach: free_slot(request.id, request.slot, peer.socket.get()); break;
      case Request::Type::GiveUp:
        if (request.request_id == peer.request_id) free_slot(peer.memory_id, peer.slot, peer.socket.get());
        peer.request_id = 0;
        break;
      default: fail(ErrorKind::Unsupported, "unknown request ", static_cast<unsigned>(request.type));
    }
  } catch (const Error& error) {
    fds.clear();
    reply.error = static_cast<std::uint32_t>(error.kind());
    if (reply.error == 0) reply.error = static_cast<std::uint32_t>(ErrorKind::Unsupported);
    std::strncpy(reply.message.data(), error.what(), reply.message.size() - 1);
  }
  return reply;
}

void Hub::free_slot(std::uint64_t memory_id, std::uint32_t slot, int socket) {
  if (const auto memory = listed().find(memory_id); memory != listed().end()) memory->second->free_slot(slot, socket);
}

void Hub::open_memory(Incoming& peer, const Request& request, Reply& reply, std::vector<int>& fds, Fd& keep_open) {
  if (!peer.greeted) fail(ErrorKind::RemoteAccess, "attach: not connected");
  const auto [memory, access] = opened(request.id, request.token, peer.peer);
  const auto& segment = memory.segment();
  if (segment != nullptr && access == Access::Read) keep_open = segment->read_only_fd();
  reply.nbytes = memory.nbytes();
  reply.access = static_cast<std::uint32_t>(access);
  reply.slots = memory.control().slots();
  reply.signals = memory.control().signals();
  reply.slot = memory.take_slot(peer.socket.get());
  peer.request_id = request.request_id, peer.memory_id = request.id, peer.slot = reply.slot;
  fds.push_back(memory.control_segment()->fd());
  if (segment != nullptr) {
    reply.segment_nbytes = segment->nbytes();
    reply.segment_offset = static_cast<std::uint64_t>(static_cast<char*>(memory.data()) - segment->base());
    fds.push_back(keep_open ? keep_open.get() : segment->fd());
  } else {
    reply.address = reinterpret_cast<std::uint64_t>(memory.data());
    reply.probe_address = reinterpret_cast<std::uint64_t>(token().data());
  }
}

// The peer at the other end of an accepted connection is gone, or at least will not come back on it.
void Hub::drop(int socket) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, memory] : listed()) memory->free_slots_of(socket);
  forget_in_forked_child(socket);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);  // a child between fork and exec may have it open, too
  incoming_.erase(socket);
}

void Hub::check_watched(int fd) {
  std::shared_ptr<ShmConnection> connection;
  {
    std::lock_guard lock(mutex_);
    const auto watched = watched_.find(fd);
    if (watched == watched_.end()) return;
    connection = watched->second.lock();
    // The event may have been meant for an earlier user of this descriptor's number.
    pollfd again{fd, POLLRDHUP | POLLIN, 0};
    const bool is_pidfd = connection != nullptr && fd == connection->pidfd();
    if (::poll(&again, 1, 0) <= 0 || (again.revents & (is_pidfd ? POLLIN : POLLRDHUP | POLLHUP | POLLERR)) == 0) return;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd,
                nullptr);  // it has said what it can say; listed it stays until unwatch()
  }
  if (connection == nullptr) return;
  connection->lose_peer(fd == connection->pidfd());
  wake_waiters();
}

}  // namespace onesided::shm
