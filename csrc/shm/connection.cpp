#include "shm/connection.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/process.h"

namespace onesided::shm {
namespace {

void check_within(const RemoteMemory& remote, std::uint64_t nbytes) {
  if (remote.offset > nbytes || remote.nbytes > nbytes - remote.offset) {
    fail(ErrorKind::Handle, "attach: this handle describes more than the ", nbytes, " bytes of the memory");
  }
}

}  // namespace

ShmConnection::ShmConnection(std::shared_ptr<Hub> hub, const Endpoint& peer, const std::string& name, Fd socket,
                             PeerCredentials credentials)
    : hub_(std::move(hub)),
      transport_(peer.transport),
      pid_(credentials.pid),
      peer_(std::make_shared<PeerState>(name)),
      counters_(counters_for("shm", name)),
      socket_(std::move(socket)) {
  close_in_forked_child(socket_.get());
  // Death shows on the socket, too; the pidfd also tells it when a child of the peer has inherited the socket.
  if (pid_ != 0 && pid_ != ::getpid()) pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
}

std::shared_ptr<ShmConnection> ShmConnection::open(std::shared_ptr<Hub> hub, const Endpoint& peer,
                                                   const std::string& name, const Deadline& deadline) {
  if (peer.kind != TransportKind::Shm) {
    fail(ErrorKind::Handle, "connect: this endpoint is of kind '", onesided::name_of(peer.kind), "', not 'shm'");
  }
  if (peer.host != host_token()) {
    fail(ErrorKind::Unsupported, "connect: ", name,
         " runs on another host or in another network namespace; shm reaches neither");
  }
  Fd socket = connect_to(peer.address, deadline);
  const PeerCredentials credentials = shm::credentials(socket.get());
  if (credentials.uid != ::geteuid() && ::geteuid() != 0) {  // as the peer will see it, see Hub::accept_all
    fail(ErrorKind::RemoteAccess, "connect: ", name, " is owned by user ", credentials.uid, ", this process by ",
         ::geteuid());
  }
  std::shared_ptr<ShmConnection> connection(new ShmConnection(hub, peer, name, std::move(socket), credentials));
  Request hello;
  hello.type = Request::Type::Hello;
  hello.id = peer.endpoint_id;
  hello.token = peer.secret;
  connection->ask(hello, nullptr, deadline);
  hub->watch(connection, connection->socket_.get(), connection->pidfd_.get());
  return connection;
}

ShmConnection::~ShmConnection() {
  if (hub_->forked()) {
    socket_.release();  // closed by the fork handler; the number may be another file's now
    return;
  }
  InterruptScope undisturbed(nullptr);
  try {
    close(Deadline::after(5));
  } catch (const Error&) {
    // It is closed all the same.
  }
  forget_in_forked_child(socket_.get());
}

Reply ShmConnection::ask(Request request, std::vector<Fd>* fds, const Deadline& deadline) {
  const auto silent = [&] {
    fail(ErrorKind::DeadlineExceeded, peer_->name(), " does not answer (its process may be stopped)");
  };
  if (!asked_.await([this] { return !asking_.exchange(true); }, deadline)) silent();
  struct Asking {
    ShmConnection& connection;
    ~Asking() {
      connection.asking_.store(false);
      connection.asked_.notify();
    }
  } asking{*this};
  request.request_id = next_request_++;
  if (peer_->lost()) peer_->fail_lost("attach");
  if (!wait_writable(socket_.get(), deadline)) silent();
  if (!send_message(socket_.get(), request))
    fail(ErrorKind::ConnectionLost, "attach: the connection to ", peer_->name(), " has ended");
  Reply reply;
  try {
    do {
      if (!wait_readable(socket_.get(), deadline)) silent();
      std::vector<Fd> received;
      if (receive_message(socket_.get(), reply, &received) && fds != nullptr) *fds = std::move(received);
    } while (reply.request_id != request.request_id);  // others answer a question that was given up
  } catch (...) {
    Request give_up;
    give_up.type = Request::Type::GiveUp;
    give_up.request_id = request.request_id;
    send_message(socket_.get(), give_up);
    if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection was closed");
    throw;
  }
  if (reply.error != 0) {
    const auto kind = reply.error < kErrorKinds ? static_cast<ErrorKind>(reply.error) : ErrorKind::Onesided;
    throw Error(kind, text(peer_->name(), ": ",
                           std::string(reply.message.data(), ::strnlen(reply.message.data(), reply.message.size()))));
  }
  return reply;
}

std::shared_ptr<Target> ShmConnection::target(const RemoteMemory& remote, const Deadline& deadline) {
  auto target = known_target(remote, deadline);
  check_within(remote, target->nbytes());
  return target;
}

std::shared_ptr<ShmTarget> ShmConnection::known_target(const RemoteMemory& remote, const Deadline& deadline) {
  check_not_forked(hub_->made_in(), "this connection");
  check_handle(remote);
  const std::pair memory(remote.memory_id, remote.key);
  {
    std::lock_guard lock(targets_mutex_);
    if (const auto known = targets_.find(memory); known != targets_.end()) {
      counters_->add(Count::CacheHits);
      return known->second;
    }
  }
  auto target = open_memory(remote, true, deadline);
  std::vector<std::shared_ptr<Target>> ended;  // outlives the lock
  std::lock_guard lock(targets_mutex_);
  if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection is closed");
  // What its owner has closed would otherwise stay mapped for as long as the connection.
  for (auto known = targets_.begin(); known != targets_.end();) {
    if (!known->second->ended()) {
      ++known;
      continue;
    }
    ended.push_back(std::move(known->second));
    known = targets_.erase(known);
  }
  return targets_.emplace(memory, std::move(target)).first->second;
}

std::shared_ptr<Target> ShmConnection::attach(const RemoteMemory& remote, const Deadline& deadline) {
  return open_memory(remote, false, deadline);
}

// Asks the peer for the memory, maps it, and makes a target for all of it or for what `remote` describes.
std::shared_ptr<ShmTarget> ShmConnection::open_memory(const RemoteMemory& remote, bool whole,
                                                      const Deadline& deadline) {
  hub_->check_usable("this transport");
  if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection is closed");
  check_handle(remote);
  Request request;
  request.type = Request::Type::Attach;
  request.id = remote.memory_id;
  request.token = remote.key;
  std::vector<Fd> fds;
  const Reply reply = ask(request, &fds, deadline);
  const bool is_private = reply.segment_nbytes == 0;
  if (fds.size() != (is_private ? 1u : 2u))
    fail(ErrorKind::ConnectionLost, "attach: ", peer_->name(), " sent no memory");

  ShmTarget::Parts parts;
  parts.peer = peer_;
  parts.counters = counters_;
  parts.made_in = fork_generation();
  parts.access = static_cast<Access>(static_cast<unsigned>(remote.access) & reply.access & 3);
  parts.nbytes = whole ? reply.nbytes : remote.nbytes;
  const std::uint64_t offset = whole ? 0 : remote.offset;
  parts.slot = reply.slot;
  parts.keep = {shared_from_this()};
  parts.detach = [this, id = remote.memory_id, slot = reply.slot] { give_back(id, slot); };
  try {
    check_within(remote, reply.nbytes);
    if (reply.slots > Control::kMostSlots || reply.signals > Control::kMostSignals || reply.slot >= reply.slots) {
      fail(ErrorKind::ConnectionLost, "attach: ", peer_->name(), " described its memory wrongly");
    }
    auto control = Segment::map(std::move(fds[0]), Control::size_for(reply.slots, reply.signals), true);
    control->protect_front(Control::kOwnersBytes);
    parts.control = Control(control->base(), reply.slots, reply.signals);
    parts.keep.push_back(control);
    if (is_private) {
      parts.shareable = false;
      parts.cross = {pid_, pidfd_.get(), reply.address + offset};
      if (const std::string why = probe_cross_memory(pid_, reply.probe_address, transport_); !why.empty()) {
        fail(ErrorKind::Unsupported, "attach: the memory of ", peer_->name(),
             " is private and this system does not let one process ", "reach into another: ", why,
             "; use memory from Window.allocate or transport.allocate instead");
      }
    } else {
      auto data = Segment::map(std::move(fds[1]), reply.segment_nbytes,
                               permits(static_cast<Access>(reply.access & 3), Access::Write));
      if (reply.segment_offset > data->nbytes() || reply.nbytes > data->nbytes() - reply.segment_offset) {
        fail(ErrorKind::ConnectionLost, "attach: ", peer_->name(), " described its memory wrongly");
      }
      parts.mapped = data->base() + reply.segment_offset + offset;
      parts.keep.push_back(data);
    }
  } catch (...) {
    give_back(remote.memory_id, reply.slot);
    throw;
  }
  counters_->add(Count::Registrations);
  auto target = std::make_shared<ShmTarget>(std::move(parts));
  std::lock_guard lock(targets_mutex_);
  if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection is closed");
  attached_.erase(std::remove_if(attached_.begin(), attached_.end(), [](const auto& weak) { return weak.expired(); }),
                  attached_.end());
  attached_.push_back(target);
  return target;
}

void ShmConnection::check_handle(const RemoteMemory& remote) const {
  if (remote.kind == TransportKind::Shm && remote.transport == transport_) return;
  fail(ErrorKind::Handle, "attach: this handle is not of a memory of ", peer_->name());
}

void ShmConnection::give_back(std::uint64_t memory_id, std::uint32_t slot) {
  Request request;
  request.type = Request::Type::Detach;
  request.id = memory_id;
  request.slot = slot;
  send_message(socket_.get(), request);  // if that fails the slot goes with the connection
}

void ShmConnection::lose_peer(bool process_ended) {
  if (closed_.load()) return;
  peer_->lose(process_ended ? text("process ", pid_, " has ended")
                            : text("process ", pid_, " closed its transport or has ended"));
  counters_->add(Count::Errors);
}

void ShmConnection::close(const Deadline& deadline) {
  if (hub_->forked()) return;
  std::vector<std::shared_ptr<Target>> open;
  decltype(targets_) cached;
  {
    std::lock_guard lock(targets_mutex_);
    if (closed_.exchange(true)) return;
    for (const auto& weak : attached_) {
      if (auto target = weak.lock()) open.push_back(std::move(target));
    }
    cached.swap(targets_);
    attached_.clear();
  }
  FirstFailure failure;
  for (const auto& target : open) failure.attempt([&] { target->close(deadline); });
  peer_->lose("the connection was closed here");
  hub_->unwatch(socket_.get(), pidfd_.get());
  ::shutdown(socket_.get(), SHUT_RD);  // ends an attach() that waits for its answer
  hub_->wake_waiters();
  failure.rethrow();
}

Description ShmConnection::describe() const {
  return {
      {"peer", peer_->name()},
      {"kind", "shm"},
      {"pid", std::to_string(pid_)},
      {"watched", pidfd_ ? "pidfd and socket" : "socket"},
      {"state", peer_->lost() ? "lost: " + peer_->reason() : "open"},
  };
}

}  // namespace onesided::shm
