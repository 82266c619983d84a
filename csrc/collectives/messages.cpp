#include "collectives/messages.h"

#include <algorithm>
#include <cstring>

namespace onesided {

namespace {

const char* name_of(bool sends) {
  return sends ? "send" : "recv";
}

}  // namespace

Messages::Messages(std::shared_ptr<Inboxes> inboxes) : inboxes_(std::move(inboxes)), peers_(inboxes_->size()) {}

// ---- Starting -------------------------------------------------------------------------------------------------------

std::shared_ptr<Message> Messages::send(unsigned rank, std::uint64_t tag, const void* from, std::uint64_t nbytes,
                                        How how, bool served) {
  auto message = std::make_shared<Message>();
  message->sends_ = true;
  message->rank_ = rank;
  message->tag_ = tag;
  message->data_ = static_cast<char*>(const_cast<void*>(from));
  message->nbytes_ = nbytes;
  message->how_ = std::move(how);
  message->how_.async = true;
  return start(std::move(message), served);
}

std::shared_ptr<Message> Messages::receive(std::optional<unsigned> rank, std::uint64_t tag, void* into,
                                           std::uint64_t nbytes, How how, bool served) {
  auto message = std::make_shared<Message>();
  message->sends_ = false;
  message->rank_ = rank;
  message->tag_ = tag;
  message->data_ = static_cast<char*>(into);
  message->nbytes_ = nbytes;
  message->how_ = std::move(how);
  return start(std::move(message), served);
}

std::shared_ptr<Message> Messages::start(std::shared_ptr<Message> message, bool served) {
  const char* const operation = name_of(message->sends_);
  if (message->rank_ && (*message->rank_ >= inboxes_->size() || *message->rank_ == inboxes_->rank())) {
    fail(ErrorKind::Bounds, operation, ": rank ", *message->rank_, " is no other one of the ", inboxes_->size(),
         " ranks");
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_) fail(ErrorKind::StaleHandle, operation, ": the communicator was finalized");
    inboxes_->check_ended(operation);
    ++under_way_;
    needed_.store(true);
    if (message->sends_) {
      peers_[*message->rank_].sends.push_back(message);
    } else if (!meet_set_aside(message)) {
      posted_.push_back(message);
    }
  }
  if (someone_drives()) {
    inboxes_->wake_up();
  } else if (served) {
    serve_.notify();
  }
  return message;
}

// A receive that is for a message which came before it.
bool Messages::meet_set_aside(const std::shared_ptr<Message>& message) {
  for (unsigned rank = 0; rank < peers_.size(); ++rank) {
    if (message->rank_.value_or(rank) != rank) continue;
    auto& aside = peers_[rank].set_aside;
    const auto found =
        std::find_if(aside.begin(), aside.end(), [&](const auto& one) { return one->tag == message->tag_; });
    if (found == aside.end()) continue;
    const std::shared_ptr<Incoming> incoming = *found;
    aside.erase(found);
    incoming->aside = false;
    if (meet(message, rank, *incoming)) {
      if (incoming->done != 0) std::memcpy(message->data_, incoming->bytes.data(), incoming->done);
      message->done_ = incoming->done;
      if (incoming->done == incoming->nbytes) {
        incoming->message.reset();
        finish(message, std::nullopt);
      }
    }
    incoming->bytes = {};
    return true;
  }
  return false;
}

// Joins the two; false if they do not fit: then the receive has failed.
bool Messages::meet(const std::shared_ptr<Message>& message, unsigned rank, Incoming& incoming) {
  message->rank_ = rank;
  if (message->nbytes_ == incoming.nbytes) {
    incoming.message = message;
    return true;
  }
  finish(message, Error(ErrorKind::Bounds, text("recv: rank ", rank, " sends ", incoming.nbytes, " bytes (tag ",
                                                incoming.tag, ") where this rank receives ", message->nbytes_)));
  return false;
}

// ---- Waiting --------------------------------------------------------------------------------------------------------

bool Messages::wait(const std::shared_ptr<Message>& message, const Deadline& deadline) {
  while (!message->over()) {
    if (!driven_.exchange(true, std::memory_order_seq_cst)) {
      drive(message.get(), deadline);
      if (!message->over() && deadline.passed()) return false;
    } else if (!changed_.await([&] { return message->over() || !someone_drives(); }, deadline)) {
      return false;
    }
  }
  return true;
}

void Messages::serve() {
  for (;;) {
    serve_.await([&] { return needed_.load(std::memory_order_seq_cst) && !someone_drives(); }, Deadline::never());
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return;
    }
    if (!driven_.exchange(true, std::memory_order_seq_cst)) drive(nullptr, Deadline::never());
  }
}

// Has the turn: moves messages until `until` is over, or all are.
void Messages::drive(const Message* until, const Deadline& deadline) {
  struct Turn {
    Messages& self;
    ~Turn() {
      self.driven_.store(false, std::memory_order_seq_cst);
      self.changed_.notify();
      if (self.needed_.load(std::memory_order_seq_cst)) self.serve_.notify();
    }
  } turn{*this};
  for (;;) {
    bool went_on = false;
    {
      // Between two chunks others can start messages, and Ctrl-C does not come while they are shut out.
      const std::lock_guard lock(mutex_);
      const InterruptScope undisturbed(nullptr);
      const auto over = [&] { return closed_ || (until != nullptr ? until->over() : under_way_ == 0); };
      inboxes_->woken();
      try {
        inboxes_->check_ended("message");
        went_on = move_some();
        if (!over()) give_up_late_and_lost(went_on);
      } catch (const Error& error) {
        fail_all(error);
      }
      if (over() || deadline.passed()) return;
    }
    if (!went_on) wait_for_any(deadline);
  }
}

void Messages::wait_for_any(const Deadline& deadline) {
  std::vector<Wanted> wanted;
  std::vector<unsigned> ranks;
  Deadline first = deadline;
  {
    const std::lock_guard lock(mutex_);
    wanted.push_back(inboxes_->wake());
    for (unsigned rank = 0; rank < peers_.size(); ++rank) {
      const Peer& peer = peers_[rank];
      const bool sends = !peer.sends.empty(), receives = peer.incoming != nullptr || awaited(rank);
      if (sends) {
        wanted.push_back(inboxes_->room(rank));
        for (const auto& message : peer.sends) first = first.sooner(message->how_.deadline);
      }
      if (receives) wanted.push_back(inboxes_->arrival(rank));
      if (peer.incoming != nullptr && peer.incoming->message != nullptr)
        first = first.sooner(peer.incoming->message->how_.deadline);
      if (sends || receives) ranks.push_back(rank);
    }
    for (const auto& message : posted_) first = first.sooner(message->how_.deadline);
  }
  struct Lost {};
  try {
    inboxes_->wait(wanted, first, [&] {
      for (const unsigned rank : ranks) {
        if (inboxes_->lost(rank)) throw Lost{};
      }
    });
  } catch (const Lost&) {
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::DeadlineExceeded) {
      const std::lock_guard lock(mutex_);
      fail_all(error);
    }
  }
}

// ---- Moving ---------------------------------------------------------------------------------------------------------

bool Messages::move_some() {
  bool went_on = false;
  for (unsigned rank = 0; rank < peers_.size(); ++rank) {
    if (!peers_[rank].sends.empty()) went_on |= send_some(rank);
    if (rank != inboxes_->rank()) went_on |= receive_some(rank);
  }
  return went_on;
}

bool Messages::send_some(unsigned rank) {
  Peer& peer = peers_[rank];
  const std::shared_ptr<Message> message = peer.sends.front();
  if (!inboxes_->may_send(rank)) return false;
  const std::uint64_t nbytes = std::min(inboxes_->slot_nbytes(), message->nbytes_ - message->done_);
  try {
    auto work = inboxes_->send("send", rank, {message->tag_, message->nbytes_}, message->data_ + message->done_, nbytes,
                               message->how_);
    if (work != nullptr) message->works_.push_back(std::move(work));
    message->done_ += nbytes;
    if (message->done_ != message->nbytes_) return true;
    for (const auto& one : message->works_) one->wait(message->how_.deadline);
    peer.sends.pop_front();
    finish(message, std::nullopt);
  } catch (const Error& error) {
    give_up(message, error);
  }
  return true;
}

bool Messages::receive_some(unsigned rank) {
  if (!inboxes_->arrived(rank)) return false;
  Peer& peer = peers_[rank];
  if (peer.incoming == nullptr) {
    const ChunkHead head = inboxes_->head(rank);
    auto incoming = std::make_shared<Incoming>(Incoming{head.label, head.nbytes});
    if (const auto message = posted_for(rank, head.label)) {
      meet(message, rank, *incoming);
    } else if (awaited(rank)) {
      incoming->aside = true;
      incoming->bytes.reserve(head.nbytes);
      peer.set_aside.push_back(incoming);
    } else {
      return false;
    }
    peer.incoming = std::move(incoming);
  }
  Incoming& incoming = *peer.incoming;
  const std::uint64_t nbytes = std::min(inboxes_->slot_nbytes(), incoming.nbytes - incoming.done);
  const char* const payload = inboxes_->payload(rank, nbytes);
  if (incoming.message != nullptr) {
    if (nbytes != 0) std::memcpy(incoming.message->data_ + incoming.done, payload, nbytes);
    incoming.message->done_ += nbytes;
  } else if (incoming.aside) {
    incoming.bytes.insert(incoming.bytes.end(), payload, payload + nbytes);
  }
  inboxes_->take(rank);
  incoming.done += nbytes;
  if (incoming.done == incoming.nbytes) {
    const std::shared_ptr<Incoming> whole = std::move(peer.incoming);
    if (whole->message != nullptr) finish(whole->message, std::nullopt);
    whole->message.reset();
  }
  return true;
}

// The oldest receive that a message of `rank` is for; no longer posted.
std::shared_ptr<Message> Messages::posted_for(unsigned rank, std::uint64_t tag) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const auto& message) {
    return message->rank_.value_or(rank) == rank && message->tag_ == tag;
  });
  if (found == posted_.end()) return nullptr;
  const std::shared_ptr<Message> message = *found;
  posted_.erase(found);
  return message;
}

// Whether a receive waits for something from `rank`.
bool Messages::awaited(unsigned rank) const {
  return rank != inboxes_->rank() && std::any_of(posted_.begin(), posted_.end(), [&](const auto& message) {
           return message->rank_.value_or(rank) == rank;
         });
}

// ---- Ending ---------------------------------------------------------------------------------------------------------

// `went_on`: of who is lost there may be more to take.
void Messages::give_up_late_and_lost(bool went_on) {
  std::vector<std::shared_ptr<Message>> all(posted_.begin(), posted_.end());
  bool any_left = false;
  for (unsigned rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    all.insert(all.end(), peer.sends.begin(), peer.sends.end());
    if (peer.incoming != nullptr && peer.incoming->message != nullptr) all.push_back(peer.incoming->message);
    any_left |= rank != inboxes_->rank() && !inboxes_->lost(rank);
  }
  for (const auto& message : all) {
    const char* const operation = name_of(message->sends_);
    if (!went_on && !message->rank_ && !any_left) {
      give_up(message, Error(ErrorKind::ConnectionLost, "recv: all other ranks are lost"));
    } else if (!went_on && message->rank_ && inboxes_->lost(*message->rank_)) {
      try {
        inboxes_->fail_lost(operation, *message->rank_);
      } catch (const Error& error) {
        give_up(message, error);
      }
    } else if (message->how_.deadline.passed()) {
      const std::string who = message->rank_ ? text("rank ", *message->rank_) : std::string("any rank");
      give_up(message, Error(ErrorKind::DeadlineExceeded,
                             text(operation, message->sends_ ? " to " : " from ", who, " (tag ", message->tag_,
                                  "): ", message->done_, " of ", message->nbytes_, " bytes moved until the deadline")));
    }
  }
  if (went_on) return;
  for (unsigned rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.incoming == nullptr || !inboxes_->lost(rank)) continue;
    std::erase(peer.set_aside, peer.incoming);  // half a message
    peer.incoming.reset();
  }
}

// Ends one that cannot or must not go on.
void Messages::give_up(const std::shared_ptr<Message>& message, Error error) {
  if (message->over()) return;
  if (!message->sends_) {
    std::erase(posted_, message);
    for (Peer& peer : peers_) {
      if (peer.incoming == nullptr || peer.incoming->message != message) continue;
      peer.incoming->message.reset();  // what comes of it is thrown away
    }
    finish(message, std::move(error));
    return;
  }
  for (const auto& work : message->works_) {
    try {
      work->wait(Deadline::after(0));
    } catch (const Error&) {  // it is over, which is all that is asked
    }
  }
  std::erase(peers_[*message->rank_].sends, message);
  finish(message, error);
  // Its receiver, if it is still there, would take the next message for the rest of this one.
  const bool receiver_is_there = error.kind() == ErrorKind::DeadlineExceeded || error.kind() == ErrorKind::Onesided;
  if (message->done_ != 0 && receiver_is_there) inboxes_->end(error.kind(), error.what());
}

void Messages::withdraw(const std::shared_ptr<Message>& message, const std::string& why) {
  const std::lock_guard lock(mutex_);
  const InterruptScope undisturbed(nullptr);
  give_up(message, Error(ErrorKind::Onesided, text(name_of(message->sends_), ": ", why)));
}

void Messages::fail_all(const Error& error) {
  std::vector<std::shared_ptr<Message>> all(posted_.begin(), posted_.end());
  posted_.clear();
  for (Peer& peer : peers_) {
    all.insert(all.end(), peer.sends.begin(), peer.sends.end());
    peer.sends.clear();
    if (peer.incoming != nullptr && peer.incoming->message != nullptr) all.push_back(peer.incoming->message);
    peer.incoming.reset();
  }
  for (const auto& message : all) {
    for (const auto& work : message->works_) {
      try {
        work->wait(Deadline::after(0));
      } catch (const Error&) {  // it is over, which is all that is asked
      }
    }
    finish(message, error);
  }
}

void Messages::finish(const std::shared_ptr<Message>& message, std::optional<Error> error) {
  if (message->over()) return;
  message->error_ = std::move(error);
  message->works_.clear();
  message->how_.keep = nullptr;
  message->how_.allocation = nullptr;
  message->over_.store(true, std::memory_order_seq_cst);
  if (--under_way_ == 0 && !closed_) needed_.store(false);
  changed_.notify();
}

void Messages::close() {
  bool half_sent = false;
  {
    const std::lock_guard lock(mutex_);
    const InterruptScope undisturbed(nullptr);
    if (closed_) return;
    closed_ = true;
    needed_.store(true);
    for (const Peer& peer : peers_) half_sent |= !peer.sends.empty() && peer.sends.front()->done_ != 0;
    fail_all(Error(ErrorKind::StaleHandle, "the communicator was finalized before the message was over"));
  }
  if (half_sent) inboxes_->end(ErrorKind::ConnectionLost, "it was finalized in the middle of a message");
  serve_.notify();
  if (someone_drives()) inboxes_->wake_up();
  changed_.await([&] { return !someone_drives(); }, Deadline::never());
}

}  // namespace onesided
