#include "verbs/hub.h"

#if ONESIDED_HAS_VERBS
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "verbs/connection.h"

namespace onesided::verbs {
namespace {

// Where peers introduce themselves: at the address that the first rail's GID stands for, which they must be able to reach in
// any case, or at this host's own.
std::string listening_host(const std::vector<Rail>& rails, const std::string& asked) {
  if (!asked.empty()) {
    in6_addr parsed{};
    if (::inet_pton(AF_INET, asked.c_str(), &parsed) != 1 && ::inet_pton(AF_INET6, asked.c_str(), &parsed) != 1) {
      fail(ErrorKind::Bounds, "address or ONESIDED_RDMA_ADDRESS: '", asked, "' is no IP address");
    }
    return asked;
  }
  const Gid& gid = rails[0].gid;
  const bool link_local = gid.value.raw[0] == 0xFE && (gid.value.raw[1] & 0xC0) == 0x80;
  if (gid.type != IBV_GID_TYPE_IB && !link_local) return gid.address();
  return net::default_address();
}

// What an asynchronous event is about, and what it says.
const char* meaning(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_CQ_ERR: return "its completion queue overflowed or failed";
    case IBV_EVENT_QP_FATAL: return "the device reported a fatal error of the queue pair";
    case IBV_EVENT_QP_REQ_ERR: return "the peer's device sent a request that the queue pair could not take";
    case IBV_EVENT_QP_ACCESS_ERR: return "the peer's device asked for what is not permitted";
    case IBV_EVENT_PORT_ERR: return "the port went down";
    case IBV_EVENT_DEVICE_FATAL: return "the device failed";
    default: return nullptr;
  }
}

}  // namespace

Hub::Hub(std::vector<Rail> rails, const Tuning& tuning, std::string host)
    : Registry(TransportKind::Rdma),
      rails_(std::move(rails)),
      tuning_(tuning),
      listener_(net::listen_on(listening_host(rails_, host))),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) {
    fail_errno(ErrorKind::Onesided, errno,
               "no descriptors for the transport's thread (RLIMIT_NOFILE: raise it with ulimit -n)");
  }
  for (const Rail& rail : rails_) {
    const auto same = std::find_if(devices_.begin(), devices_.end(),
                                   [&](const auto& device) { return device->name() == rail.port.device; });
    devices_.push_back(same != devices_.end() ? *same : Device::open(rail.port.device));
  }
}

Hub::~Hub() {
  if (thread_.joinable()) {
    if (forked()) {
      new std::thread(std::move(thread_));
    } else {
      stop();
    }
  }
}

void Hub::start() {
  for (const int fd : {listener_.socket.get(), epoll_.get(), wake_.get()}) close_in_forked_child(fd);
  add_to_epoll(epoll_.get(), listener_.socket.get(), EPOLLIN);
  add_to_epoll(epoll_.get(), wake_.get(), EPOLLIN);
  std::set<int> added;
  for (const auto& device : devices_) {
    const int fd = device->context()->async_fd;
    if (!added.insert(fd).second) continue;
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    add_to_epoll(epoll_.get(), fd, EPOLLIN);
  }
  thread_ = start_thread([this] { run(); });
}

void Hub::stop() {
  if (stopped_.exchange(true)) return;
  nudge();
  if (thread_.joinable()) {
    // The last user may be the thread itself, which then ends by itself.
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  std::vector<std::weak_ptr<Allocation>> allocations;
  std::lock_guard lock(mutex_);
  for (const auto& [fd, peer] : incoming_) forget_in_forked_child(fd);
  incoming_.clear();
  allocations.swap(allocations_);
  for (const auto& weak : allocations) {
    if (const auto allocation = weak.lock()) allocation->forget(this);
  }
  for (const int fd : {listener_.socket.get(), epoll_.get(), wake_.get()}) forget_in_forked_child(fd);
  listener_.socket.reset();
}

void Hub::nudge() {
  const std::uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) < 0 && errno != EAGAIN) {
    fail_errno(ErrorKind::Onesided, errno, "the transport's thread cannot be woken");
  }
}

std::shared_ptr<Registration> Hub::registration_of(const std::shared_ptr<Allocation>& allocation) {
  bool made = false;
  const auto kept = allocation->kept(this, [&] {
    HostMemory memory(allocation->data());
    auto registration = std::make_shared<Registration>(
        devices_, memory, reinterpret_cast<std::uint64_t>(allocation->data()), allocation->nbytes(), kDestination);
    made = true;
    return registration;
  });
  if (made) {
    counters()->add(Count::Registrations);
    std::lock_guard lock(mutex_);
    std::erase_if(allocations_, [](const auto& weak) { return weak.expired(); });
    allocations_.push_back(allocation);
  } else {
    counters()->add(Count::CacheHits);
  }
  return std::static_pointer_cast<Registration>(kept);
}

void Hub::revoke(std::uint64_t memory_id, const std::string* peer, const Deadline& deadline) {
  // Those that were told and have not answered.
  const auto waited_for = [memory_id](const Incoming& incoming) {
    const auto held = incoming.attached.find(memory_id);
    return held != incoming.attached.end() && held->second.told != 0;
  };
  {
    Message message;
    message.id = memory_id;
    std::lock_guard lock(mutex_);
    for (auto& [fd, incoming] : incoming_) {
      const auto held = incoming.attached.find(memory_id);
      if (held == incoming.attached.end()) continue;
      held->second.told = held->second.count;
      message.say = peer == nullptr || incoming.peer == *peer ? Say::Revoke : Say::Renew;
      incoming.socket->send(message.to_bytes());
      update_events(fd, incoming.socket->has_rest());
    }
  }
  for (;;) {
    const std::uint64_t seen = answers_.load();
    {
      std::lock_guard lock(mutex_);
      if (std::none_of(incoming_.begin(), incoming_.end(), [&](const auto& one) { return waited_for(one.second); }))
        return;
    }
    if (!revoked_.await([&] { return answers_.load() != seen; }, deadline)) break;
  }
  Message ended;
  ended.say = Say::Ended;
  ended.id = memory_id;
  const std::string bytes = ended.to_bytes();
  std::lock_guard lock(mutex_);
  for (auto& [fd, incoming] : incoming_) {
    if (!waited_for(incoming)) continue;
    incoming.attached.erase(memory_id);
    // It may be in the middle of a write. When it goes on, it hears of this and opens the next generation.
    incoming.responders.clear();
    incoming.socket->send(bytes);
    update_events(fd, incoming.socket->has_rest());
  }
}

void Hub::watch(const std::shared_ptr<RdmaConnection>& connection) {
  const int fd = connection->socket().fd();
  close_in_forked_child(fd);
  std::lock_guard lock(mutex_);
  check_not_retired();
  watched_[fd] = connection;
  add_to_epoll(epoll_.get(), fd, EPOLLIN | EPOLLRDHUP);
}

void Hub::unwatch(int socket) {
  std::lock_guard lock(mutex_);
  if (watched_.erase(socket) == 0) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket, nullptr);
}

std::vector<std::shared_ptr<RdmaConnection>> Hub::connections() {
  std::vector<std::shared_ptr<RdmaConnection>> alive;
  std::lock_guard lock(mutex_);
  for (const auto& [fd, weak] : watched_) {
    if (auto connection = weak.lock()) alive.push_back(std::move(connection));
  }
  return alive;
}

// ---- The thread -----------------------------------------------------------------------------------------------------

void Hub::run() {
  // Whoever ends last may be this thread: the connections it looked at are let go of before the next turn.
  bool unfinished = false, strangers = false;
  while (!stopped_.load()) {
    epoll_event events[32];
    const int count = ::epoll_wait(epoll_.get(), events, 32, unfinished ? 1 : strangers ? 1000 : -1);
    for (int i = 0; i < count && !stopped_.load(); ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) {
        std::uint64_t ignored;
        while (::read(fd, &ignored, sizeof ignored) > 0) continue;
        continue;
      }
      if (fd == listener_.socket.get()) {
        accept_all();
        continue;
      }
      const auto device = std::find_if(devices_.begin(), devices_.end(),
                                       [&](const auto& one) { return one->context()->async_fd == fd; });
      if (device != devices_.end()) {
        report(**device);
        continue;
      }
      bool is_incoming = false;
      std::shared_ptr<RdmaConnection> connection;
      {
        std::lock_guard lock(mutex_);
        is_incoming = incoming_.count(fd) != 0;
        if (const auto watched = watched_.find(fd); watched != watched_.end()) connection = watched->second.lock();
      }
      if (is_incoming) serve(fd);
      if (connection != nullptr) hear(connection, events[i].events);
    }
    unfinished = false;
    for (const auto& connection : connections()) unfinished |= connection->finish_revocations();
    strangers = drop_silent_strangers();
  }
}

void Hub::accept_all() {
  for (;;) {
    Fd socket = net::accept_one(listener_.socket.get());
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) ::poll(nullptr, 0, 10);  // it stays in the queue
      return;
    }
    const int fd = socket.get();
    std::lock_guard lock(mutex_);
    try {
      add_to_epoll(epoll_.get(), fd, EPOLLIN);
    } catch (const Error&) {
      continue;  // not enough of something: this connection ends, the others go on
    }
    close_in_forked_child(fd);
    incoming_[fd].socket = std::make_unique<net::FramedSocket>(std::move(socket));
  }
}

// With the lock held.
void Hub::update_events(int fd, bool rest) {
  epoll_event event{};
  event.events = EPOLLIN | (rest ? EPOLLOUT : 0u);
  event.data.fd = fd;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Hub::serve(int fd) {
  std::unique_lock lock(mutex_);
  Incoming& peer = incoming_.at(fd);  // only this thread takes it out
  try {
    if (!peer.socket->send_rest()) fail(ErrorKind::ConnectionLost, "the connection has ended");
    // One peer does not keep the others waiting for long: what it says beyond that is heard in the next turn.
    bool more = true;
    for (unsigned frame = 0; more && frame < kFramesATurn; ++frame) {
      const auto bytes = peer.socket->receive();
      more = bytes.has_value();
      if (!more) break;
      if (const auto reply = answer(peer, Message::from_bytes(*bytes))) {
        if (!peer.socket->send(reply->to_bytes())) fail(ErrorKind::ConnectionLost, "the connection has ended");
      }
    }
    update_events(fd, more || peer.socket->has_rest());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::Handle) {  // another version, or no version at all: it is told, and hung up on
      Message failed;
      failed.say = Say::Failed;
      failed.error = error.kind();
      failed.text = error.what();
      peer.socket->send(failed.to_bytes());
    }
    lock.unlock();
    drop(fd);
  }
}

// With the lock held.
std::optional<Message> Hub::answer(Incoming& peer, const Message& message) {
  Message reply;
  reply.request_id = message.request_id;
  try {
    if (message.say != Say::Hello && !peer.greeted) fail(ErrorKind::RemoteAccess, "not connected");
    switch (message.say) {
      case Say::Hello:
        peer.peer = greeted(message.id, message.token);
        peer.greeted = true;
        reply.say = Say::Welcome;
        for (const Rail& rail : rails_) {
          reply.rails.push_back({rail.gid.value, rail.port.lid, static_cast<std::uint8_t>(rail.port.active_mtu)});
        }
        return reply;
      case Say::Open: open_pairs(peer, message, reply); return reply;
      case Say::Attach: {
        const auto [memory, access] = opened(message.id, message.token, peer.peer);
        const auto peers = std::count_if(incoming_.begin(), incoming_.end(), [&](const auto& other) {
          return other.second.attached.count(message.id) != 0;
        });
        if (peer.attached.count(message.id) == 0 && peers >= memory.most_peers()) {
          fail(ErrorKind::Unsupported, "attach: all ", memory.most_peers(),
               " places of this memory, for peers and for its owner itself, are taken");
        }
        reply.say = Say::Attached;
        reply.reach = memory.reach(access);
        ++peer.attached[message.id].count;
        return reply;
      }
      case Say::Detach:
      case Say::Revoked:
        if (const auto held = peer.attached.find(message.id); held != peer.attached.end()) {
          auto& [count, told] = held->second;
          const unsigned over = message.say == Say::Detach ? 1 : told;
          count -= std::min(count, over);
          told -= std::min(told, over);
          if (count == 0) peer.attached.erase(held);
        }
        answers_.fetch_add(1);
        revoked_.notify();
        return std::nullopt;
      default: fail(ErrorKind::Unsupported, "unexpected message ", static_cast<unsigned>(message.say));
    }
  } catch (const Error& error) {
    reply = Message();
    reply.request_id = message.request_id;
    reply.say = Say::Failed;
    reply.error = error.kind();
    reply.text = error.what();
    return reply;
  }
}

void Hub::open_pairs(Incoming& peer, const Message& message, Message& reply) {
  // The queue pairs of the old generation go first: whatever of it is still on its way finds nobody.
  peer.responders.clear();
  reply.say = Say::Opened;
  reply.generation = message.generation;
  for (const PairRequest& pair : message.pairs) {
    if (pair.remote_rail >= rails_.size()) {
      fail(ErrorKind::Handle, "connect: there is no rail ", unsigned{pair.remote_rail}, " here");
    }
    auto responder = std::make_unique<Responder>(devices_[pair.remote_rail], rails_[pair.remote_rail], tuning_);
    responder->accept(pair.address);
    PairRequest answer = pair;
    answer.address = responder->address();
    reply.pairs.push_back(answer);
    peer.responders.push_back(std::move(responder));
  }
}

void Hub::drop(int fd) {
  Incoming ended;  // destroyed without the lock
  {
    std::lock_guard lock(mutex_);
    const auto found = incoming_.find(fd);
    if (found == incoming_.end()) return;
    forget_in_forked_child(fd);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    ended = std::move(found->second);
    incoming_.erase(found);
  }
  ended = Incoming();
  answers_.fetch_add(1);
  revoked_.notify();
}

// Returns whether there are some left.
bool Hub::drop_silent_strangers() {
  std::vector<int> late;
  std::size_t strangers = 0;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [fd, peer] : incoming_) {
      if (peer.greeted) continue;
      if (peer.greets.passed() || ++strangers > kMostStrangers) late.push_back(fd);
    }
  }
  for (const int fd : late) drop(fd);
  return strangers != 0;
}

void Hub::hear(const std::shared_ptr<RdmaConnection>& connection, std::uint32_t events) {
  net::FramedSocket& socket = connection->socket();
  try {
    if (events & EPOLLOUT) socket.send_rest();
    while (const auto bytes = socket.receive()) connection->hear(Message::from_bytes(*bytes));
  } catch (const Error& error) {
    unwatch(socket.fd());
    connection->lose_peer(error.kind() == ErrorKind::Handle ? error.what() : "");
    wake_waiters();
    return;
  }
  if (socket.has_rest()) update_events(socket.fd(), true);
}

void Hub::report(Device& device) {
  ibv_async_event event{};
  while (api().get_async_event(device.context(), &event) == 0) {
    const ibv_event_type type = event.event_type;
    const ibv_qp* const pair = event.element.qp;
    const ibv_cq* const queue = event.element.cq;
    const int port = event.element.port_num;
    // First: a queue pair with an event that was not acknowledged cannot be destroyed.
    api().ack_async_event(&event);
    const char* const what = meaning(type);
    if (what == nullptr) continue;
    const std::string cause = text(device.name(), type == IBV_EVENT_PORT_ERR ? text(":", port) : "", ": ", what);
    const auto concerned = [&](const Channel& channel) {
      switch (type) {
        case IBV_EVENT_CQ_ERR: return channel.uses(queue);
        case IBV_EVENT_PORT_ERR: return channel.uses(device.context(), port);
        case IBV_EVENT_DEVICE_FATAL: return channel.uses(device.context(), 0);
        default: return channel.uses(pair);
      }
    };
    const bool completions_come = type != IBV_EVENT_CQ_ERR && type != IBV_EVENT_DEVICE_FATAL;
    for (const auto& connection : connections()) {
      connection->end_channels(ErrorKind::ConnectionLost, cause, concerned, completions_come);
    }
    wake_waiters();
  }
}

}  // namespace onesided::verbs
#endif
