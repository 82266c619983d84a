#include "verbs/connection.h"

#if ONESIDED_HAS_VERBS
#include <unistd.h>

#include <algorithm>

#include "verbs/target.h"

namespace onesided::verbs {

RdmaConnection::RdmaConnection(std::shared_ptr<Hub> hub, const Endpoint& peer, const std::string& name, Fd socket)
    : hub_(std::move(hub)),
      transport_(peer.transport),
      pid_(peer.pid),
      peer_(std::make_shared<PeerState>(name)),
      counters_(counters_for("rdma", name)),
      socket_(std::make_unique<net::FramedSocket>(std::move(socket))) {}

std::shared_ptr<RdmaConnection> RdmaConnection::open(std::shared_ptr<Hub> hub, const Endpoint& peer,
                                                     const std::string& name, const Deadline& deadline) {
  if (peer.kind != TransportKind::Rdma) {
    fail(ErrorKind::Handle, "connect: this endpoint is of kind '", onesided::name_of(peer.kind), "', not 'rdma'");
  }
  Fd socket = net::connect_to(peer.address, name, deadline);
  std::shared_ptr<RdmaConnection> connection(new RdmaConnection(hub, peer, name, std::move(socket)));
  hub->watch(connection);
  try {
    Message hello;
    hello.say = Say::Hello;
    hello.id = peer.endpoint_id;
    hello.token = peer.secret;
    hello.pid = static_cast<std::uint32_t>(::getpid());
    connection->peer_rails_ = connection->ask(std::move(hello), Say::Welcome, deadline).rails;
    if (connection->peer_rails_.empty()) fail(ErrorKind::ConnectionLost, "connect: ", name, " has no rails");
    connection->channel(deadline);
  } catch (...) {
    connection->close(Deadline::after(0));
    throw;
  }
  return connection;
}

RdmaConnection::~RdmaConnection() {
  if (hub_->forked()) {
    new std::deque<std::shared_ptr<Channel>>(std::move(channels_));  // the parent's queue pairs
    return;
  }
  InterruptScope undisturbed(nullptr);
  try {
    close(Deadline::after(5));
  } catch (const Error&) {
    // It is closed all the same.
  }
  forget_in_forked_child(socket_->fd());
}

// ---- Questions to the peer ------------------------------------------------------------------------------------------

Message RdmaConnection::ask(Message question, Say expected, const Deadline& deadline) {
  std::uint64_t request = 0;
  {
    std::lock_guard lock(mutex_);
    request = question.request_id = next_request_++;
    asked_[request] = std::nullopt;
  }
  struct Asked {
    RdmaConnection& connection;
    const std::uint64_t request;
    ~Asked() {
      std::lock_guard lock(connection.mutex_);
      connection.asked_.erase(request);
    }
  } asked{*this, request};
  if (peer_->lost()) peer_->fail_lost("connect");
  if (!socket_->send(question.to_bytes())) {
    fail(ErrorKind::ConnectionLost, "connect: the connection to ", peer_->name(), " has ended");
  }
  if (socket_->has_rest()) hub_->nudge();
  std::optional<Message> answer;
  const bool in_time = answered_.await(
      [&] {
        std::lock_guard lock(mutex_);
        answer = asked_.at(request);
        return answer.has_value() || peer_->lost() || closed_.load();
      },
      deadline);
  if (!in_time) {
    fail(ErrorKind::DeadlineExceeded, peer_->name(), " has not answered in time (its process may be stopped)");
  }
  if (!answer) {
    if (closed_.load()) fail(ErrorKind::StaleHandle, "this connection was closed");
    peer_->fail_lost("connect");
  }
  if (answer->say == Say::Failed) throw Error(answer->error, text(peer_->name(), ": ", answer->text));
  if (answer->say != expected) {
    fail(ErrorKind::ConnectionLost, "connect: ", peer_->name(), " does not speak this protocol");
  }
  return std::move(*answer);
}

void RdmaConnection::hear(const Message& message) {
  if (message.say == Say::Ended) {
    end_channels(ErrorKind::ConnectionLost,
                 "the peer took its queue pairs away, as it closed a memory and this process did not answer",
                 [](const Channel&) { return true; });
    return;
  }
  if (message.say == Say::Revoke || message.say == Say::Renew) {
    Revocation revocation{message.id, {}};
    {
      std::lock_guard lock(mutex_);
      for (const auto& [memory, target] : targets_) {
        if (target->memory_id() == message.id) revocation.targets.push_back(target);
      }
      for (const auto& weak : attached_) {
        if (auto target = weak.lock(); target != nullptr && target->memory_id() == message.id) {
          revocation.targets.push_back(std::move(target));
        }
      }
      for (const auto& target : revocation.targets) target->bar(message.say == Say::Renew);
      if (!closed_.load()) revocations_.push_back(std::move(revocation));
    }
    return;  // finish_revocations() follows in the same turn of the hub's thread
  }
  {
    std::lock_guard lock(mutex_);
    if (const auto asked = asked_.find(message.request_id); asked != asked_.end()) asked->second = message;
  }
  answered_.notify();
}

// A generation that ended in the middle of something may have bytes on their way. Before the peer hears that nothing of this
// process uses a memory any more, it has to end the old queue pairs: by the opening of the next generation, which another
// thread may be at, or by an opening of none. False if that thread is not through by the deadline.
bool RdmaConnection::retire_ended(const Deadline& deadline) {
  const std::shared_ptr<Channel>* const present = present_.load(std::memory_order_acquire);
  if (present == nullptr || !(*present)->ended() || peer_->lost() || retired_.load() == present->get()) return true;
  if (!opened_.await([this] { return !opening_.exchange(true); }, deadline)) return false;
  // Only the thread that opens changes it: either it is the same, or its end was told with the opening of the next.
  if (present_.load() == present) {
    Message open;
    open.say = Say::Open;
    socket_->send(open.to_bytes());
    retired_.store(present->get());
  }
  opening_.store(false);
  opened_.notify();
  return true;
}

bool RdmaConnection::finish_revocations() {
  std::vector<Revocation> pending;
  {
    std::lock_guard lock(mutex_);
    pending.swap(revocations_);
  }
  if (pending.empty()) return false;
  if (!retire_ended(Deadline::after(0))) {
    std::lock_guard lock(mutex_);
    std::move(pending.begin(), pending.end(), std::back_inserter(revocations_));
    return true;
  }
  std::vector<Revocation> left;
  for (Revocation& revocation : pending) {
    const bool quiet = std::all_of(revocation.targets.begin(), revocation.targets.end(),
                                   [](const auto& target) { return target->quiet(); });
    if (!quiet) {
      left.push_back(std::move(revocation));
      continue;
    }
    Message revoked;
    revoked.say = Say::Revoked;
    revoked.id = revocation.memory_id;
    socket_->send(revoked.to_bytes());
  }
  const bool unfinished = !left.empty();
  std::lock_guard lock(mutex_);
  if (!closed_.load()) std::move(left.begin(), left.end(), std::back_inserter(revocations_));
  return unfinished;
}

void RdmaConnection::lose_peer(const std::string& reason) {
  if (closed_.load()) return;
  peer_->lose(reason.empty() ? text("process ", pid_, " closed its transport or has ended") : reason);
  counters_->add(Count::Errors);
  answered_.notify();
  opened_.notify();
  end_channels(ErrorKind::ConnectionLost, peer_->reason(), [](const Channel&) { return true; });
}

void RdmaConnection::end_channels(ErrorKind kind, const std::string& cause,
                                  const std::function<bool(const Channel&)>& which, bool completions_come) {
  std::shared_ptr<Channel> ended;
  {
    std::lock_guard lock(channels_mutex_);
    if (!channels_.empty() && !channels_.back()->ended() && which(*channels_.back())) ended = channels_.back();
  }
  if (ended != nullptr) ended->end(kind, cause, completions_come);
}

// ---- Generations ----------------------------------------------------------------------------------------------------

void RdmaConnection::check_open() const {
  if (closed_.load()) fail(ErrorKind::StaleHandle, "this connection is closed");
  if (peer_->lost()) peer_->fail_lost("put or get");
}

const std::shared_ptr<Channel>& RdmaConnection::reopen(const Deadline& deadline) {
  check_not_forked(hub_->made_in(), "this connection");
  check_open();
  if (!opened_.await([this] { return peer_->lost() || !opening_.exchange(true); }, deadline)) {
    fail(ErrorKind::DeadlineExceeded, peer_->name(), " does not answer (its process may be stopped)");
  }
  check_open();
  struct Opening {
    RdmaConnection& connection;
    ~Opening() {
      connection.opening_.store(false);
      connection.opened_.notify();
    }
  } opening{*this};
  const std::shared_ptr<Channel>* const present = present_.load(std::memory_order_acquire);
  if (present != nullptr && !(*present)->ended()) return *present;

  // A path that fails again and again is not tried again and again: 10 ms, 20 ms, ... 1 s.
  using namespace std::chrono_literals;
  if (present != nullptr) {
    const bool failed_soon = Deadline::Clock::now() - opened_at_ < 1s && !(*present)->ended_by_deadline();
    quick_ends_ = failed_soon ? std::min(quick_ends_ + 1, 8u) : 0;
    if (quick_ends_ > 2) {
      const auto pause = std::min<std::chrono::nanoseconds>(10ms * (1u << (quick_ends_ - 2)), 1s);
      if (deadline.left(pause) < pause) {
        fail(ErrorKind::ConnectionLost, "put or get to ", peer_->name(), ": the last ", quick_ends_,
             " connections ended at once: ", (*present)->cause());
      }
      Event never;
      never.await([this] { return peer_->lost() || closed_.load(); }, Deadline::never().at_most(pause),
                  std::chrono::nanoseconds(0));
      check_open();
    }
  }
  unreachable_.clear();  // what was down then may be up now
  std::shared_ptr<Channel> channel;
  try {
    channel = make_channel(deadline);
  } catch (const Error& error) {
    if (present == nullptr) throw;
    // For an operation that needs a new generation, any reason why there is none is the loss of its way; of a deadline it is told
    // as such.
    const bool late = error.kind() == ErrorKind::DeadlineExceeded || error.kind() == ErrorKind::StaleHandle;
    throw Error(late ? error.kind() : ErrorKind::ConnectionLost,
                text("put or get to ", peer_->name(), ": the connection ended (", (*present)->cause(),
                     ") and cannot be made anew: ", error.what()));
  }
  opened_at_ = Deadline::Clock::now();
  std::lock_guard lock(channels_mutex_);
  if (closed_.load()) fail(ErrorKind::StaleHandle, "this connection is closed");
  channels_.push_back(std::move(channel));
  present_.store(&channels_.back(), std::memory_order_release);
  return channels_.back();
}

// Both ends sort their rails by name, so that equal numbers are most likely on one network; who has fewer uses each more than
// once. Where that was tried in vain, another rail of the peer's takes the place.
std::vector<Channel::LanePlan> RdmaConnection::plan_lanes() const {
  const std::size_t here = hub_->rails().size(), there = peer_rails_.size();
  std::vector<Channel::LanePlan> plans;
  std::set<std::pair<std::size_t, std::size_t>> taken;
  for (std::size_t lane = 0; lane < std::min(std::max(here, there), kMostLanes); ++lane) {
    const std::size_t local = lane % here;
    for (std::size_t step = 0; step < there; ++step) {
      const std::pair pair(local, (lane + step) % there);
      if (unreachable_.count(pair) != 0) continue;
      if (!taken.insert(pair).second) break;
      plans.push_back({hub_->devices()[local], hub_->rails()[local], local, pair.second});
      break;
    }
  }
  return plans;
}

// Tells the peer of a generation, which takes the queue pairs of the one before away first; without a channel there is none.
std::vector<QueueAddress> RdmaConnection::ask_open(std::uint32_t generation, const Channel* channel,
                                                   const Deadline& deadline) {
  Message open;
  open.say = Say::Open;
  open.generation = generation;
  if (channel != nullptr) {
    const auto addresses = channel->addresses();
    for (std::size_t lane = 0; lane < addresses.size(); ++lane) {
      open.pairs.push_back({static_cast<std::uint8_t>(channel->local_rail(lane)),
                            static_cast<std::uint8_t>(channel->remote_rail(lane)), addresses[lane]});
    }
  }
  const Message opened = ask(std::move(open), Say::Opened, deadline);
  if (opened.generation != generation) {
    fail(ErrorKind::ConnectionLost, "connect: ", peer_->name(), " answered for generation ", opened.generation,
         " instead of ", generation);
  }
  std::vector<QueueAddress> peers;
  for (const PairRequest& pair : opened.pairs) peers.push_back(pair.address);
  return peers;
}

std::shared_ptr<Channel> RdmaConnection::make_channel(const Deadline& deadline) {
  for (;;) {
    auto plans = plan_lanes();
    const auto channel = std::make_shared<Channel>(plans, hub_->tuning(), peer_->name(), ++generation_);
    channel->connect(ask_open(generation_, channel.get(), deadline));
    // Whether the rails of a pair are on one network at all shows only when something is sent: nothing, with an answer.
    Ticket ticket{};
    for (std::size_t lane = 0; lane < plans.size(); ++lane) ticket[lane] = channel->probe(lane, deadline);
    if (!channel->await(ticket, deadline)) {
      fail(ErrorKind::DeadlineExceeded, "connect: the device of ", peer_->name(), " does not answer in time");
    }
    if (channel->complete(ticket)) {
      counters_->add(Count::Registrations);
      return channel;
    }
    check_open();
    const auto failed = channel->failed_lane();
    if (!failed) throw channel->error_for("connect", Ticket{}, ticket);
    unreachable_.emplace(plans[*failed].local_rail, plans[*failed].remote_rail);
    if (plan_lanes().empty()) {
      unreachable_.clear();  // for the next try
      throw channel->error_for("connect", Ticket{}, ticket);
    }
  }
}

// ---- Targets --------------------------------------------------------------------------------------------------------

void RdmaConnection::check_handle(const RemoteMemory& remote) const {
  if (remote.kind == TransportKind::Rdma && remote.transport == transport_) return;
  fail(ErrorKind::Handle, "attach: this handle is not of a memory of ", peer_->name());
}

std::shared_ptr<Target> RdmaConnection::target(const RemoteMemory& remote, const Deadline& deadline) {
  check_not_forked(hub_->made_in(), "this connection");
  check_handle(remote);
  const std::pair memory(remote.memory_id, remote.key);
  std::shared_ptr<RdmaTarget> target;
  {
    std::lock_guard lock(mutex_);
    if (const auto known = targets_.find(memory); known != targets_.end()) target = known->second;
  }
  if (target != nullptr) {
    counters_->add(Count::CacheHits);
  } else {
    target = open_memory(remote, true, deadline);
    std::vector<std::shared_ptr<RdmaTarget>> ended;  // outlives the lock
    std::lock_guard lock(mutex_);
    if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection is closed");
    for (auto known = targets_.begin(); known != targets_.end();) {
      if (!known->second->ended()) {
        ++known;
        continue;
      }
      ended.push_back(std::move(known->second));
      known = targets_.erase(known);
    }
    target = targets_.emplace(memory, std::move(target)).first->second;
  }
  if (remote.offset > target->nbytes() || remote.nbytes > target->nbytes() - remote.offset) {
    fail(ErrorKind::Handle, "attach: this handle describes more than the ", target->nbytes(), " bytes of the memory");
  }
  return target;
}

std::shared_ptr<Target> RdmaConnection::attach(const RemoteMemory& remote, const Deadline& deadline) {
  return open_memory(remote, false, deadline);
}

Reach RdmaConnection::ask_reach(std::uint64_t memory_id, const Token& key, const Deadline& deadline) {
  Message attach;
  attach.say = Say::Attach;
  attach.id = memory_id;
  attach.token = key;
  Reach reach = ask(std::move(attach), Say::Attached, deadline).reach;
  // How many pieces there can be was checked when the message was read.
  const std::uint64_t pieces = reach.nbytes == 0 ? 0 : (reach.nbytes - 1) / reach.piece_nbytes + 1;
  if (reach.keys.size() != pieces * peer_rails_.size() || reach.words_keys.size() != peer_rails_.size()) {
    give_back(memory_id);
    fail(ErrorKind::ConnectionLost, "attach: ", peer_->name(), " described its memory wrongly");
  }
  return reach;
}

std::shared_ptr<RdmaTarget> RdmaConnection::open_memory(const RemoteMemory& remote, bool whole,
                                                        const Deadline& deadline) {
  hub_->check_usable("this transport");
  if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection is closed");
  check_handle(remote);
  Reach reach = ask_reach(remote.memory_id, remote.key, deadline);
  if (remote.offset > reach.nbytes || remote.nbytes > reach.nbytes - remote.offset) {
    give_back(remote.memory_id);
    fail(ErrorKind::Handle, "attach: this handle describes more than the ", reach.nbytes, " bytes of the memory");
  }
  const auto access = static_cast<Access>(static_cast<unsigned>(remote.access) & static_cast<unsigned>(reach.access));
  const std::uint64_t offset = whole ? 0 : remote.offset;
  const std::uint64_t nbytes = whole ? reach.nbytes : remote.nbytes;
  counters_->add(Count::Registrations);
  auto target = std::make_shared<RdmaTarget>(shared_from_this(), remote, std::move(reach), offset, nbytes, access);
  std::lock_guard lock(mutex_);
  if (closed_.load()) fail(ErrorKind::StaleHandle, "attach: this connection is closed");
  std::erase_if(attached_, [](const auto& weak) { return weak.expired(); });
  attached_.push_back(target);
  return target;
}

void RdmaConnection::give_back(std::uint64_t memory_id) {
  // If the peer cannot be told first, it is not told at all: it will take the queue pairs when it closes the memory.
  if (!retire_ended(Deadline::after(1))) return;
  Message detach;
  detach.say = Say::Detach;
  detach.id = memory_id;
  socket_->send(detach.to_bytes());  // if that fails it goes with the connection
}

void RdmaConnection::close(const Deadline& deadline) {
  if (hub_->forked() || closing_.exchange(true)) return;
  const std::shared_ptr<Channel>* const present = present_.load(std::memory_order_acquire);
  if (present != nullptr && (*present)->ended() && !peer_->lost()) {
    // What a cancelled generation may still have on the wire must not land in what comes after this connection: the peer takes
    // its queue pairs away, and says so.
    try {
      ask_open(0, nullptr, deadline.at_most(std::chrono::seconds(1)));
    } catch (const Error&) {
      // Its process is stopped, or ends: it will do so before it hears anything newer.
    }
  }
  std::vector<std::shared_ptr<RdmaTarget>> open;
  decltype(targets_) cached;
  decltype(revocations_) unanswered;  // they hold targets, which hold this connection
  {
    std::lock_guard lock(mutex_);
    if (closed_.exchange(true)) return;
    unanswered.swap(revocations_);
    for (const auto& weak : attached_) {
      if (auto target = weak.lock()) open.push_back(std::move(target));
    }
    cached.swap(targets_);
    attached_.clear();
  }
  FirstFailure failure;
  for (const auto& target : open) failure.attempt([&] { target->close(deadline); });
  peer_->lose("the connection was closed here");
  end_channels(ErrorKind::StaleHandle, "the connection was closed here", [](const Channel&) { return true; });
  hub_->unwatch(socket_->fd());
  socket_->shut();
  answered_.notify();
  opened_.notify();
  hub_->wake_waiters();
  failure.rethrow();
}

Description RdmaConnection::describe() const {
  std::shared_ptr<Channel> channel;
  {
    std::lock_guard lock(channels_mutex_);
    if (!channels_.empty()) channel = channels_.back();
  }
  Description rows{
      {"peer", peer_->name()},
      {"kind", "rdma"},
      {"pid", std::to_string(pid_)},
      {"state", peer_->lost() ? "lost: " + peer_->reason() : "open"},
  };
  if (channel != nullptr) {
    rows.emplace_back("generation", std::to_string(channel->generation()));
    for (std::size_t lane = 0; lane < channel->lanes(); ++lane) {
      rows.emplace_back(text("lane ", lane),
                        text(channel->lane_name(lane), ", to the peer's rail ", channel->remote_rail(lane), ", ",
                             channel->bytes_posted(lane), " bytes posted"));
    }
    if (channel->ended()) rows.emplace_back("ended", channel->cause());
  }
  return rows;
}

}  // namespace onesided::verbs
#endif
