#include "collectives/lanes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/copy.h"
#include "core/process.h"

namespace onesided {

namespace {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kHeadNbytes = kLine;
constexpr std::uint64_t kFarewellNbytes = 4 * kLine;
constexpr double kFarewellSeconds = 0.2;  // for telling one peer: others are told after it

}  // namespace

// What begins the window of each rank. Behind it, for every origin: why it has ended the lanes.
struct Lanes::Head {
  std::atomic<std::uint64_t> label;  // of the operation that this rank has begun last
};

// What begins a slot. So few bytes as fit its cache line follow at once, others in the next line.
struct Lanes::SlotHead {
  std::uint64_t label;
  std::uint64_t nbytes;  // of the whole transfer
};

namespace {

constexpr std::uint64_t kSlotHead = 16;
constexpr std::uint64_t kShort = kLine - kSlotHead;  // so many bytes share the line of their head

std::uint64_t payload_offset(std::uint64_t chunk_nbytes) {
  return chunk_nbytes <= kShort ? kSlotHead : kLine;
}

std::uint64_t stride(std::uint64_t slot_nbytes) {
  return kLine + (slot_nbytes + kLine - 1) / kLine * kLine;
}

}  // namespace

// A move under way.
struct Lanes::Running {
  const Move* move = nullptr;
  Running* behind = nullptr;  // over before this begins: the same rank, the same direction
  Running* after = nullptr;   // never behind this: it has the same goal
  std::uint64_t done = 0;     // bytes
  bool over = false;

  bool sends() const { return move->kind == Move::Kind::Send; }
  bool may_begin() const { return behind == nullptr || behind->over; }
  // Up to where bytes may be written.
  std::uint64_t open_until() const { return after == nullptr || after->over ? move->nbytes : after->done; }
};

std::uint64_t Lanes::window_nbytes(unsigned ranks, std::uint32_t slots, std::uint64_t slot_nbytes) {
  return kHeadNbytes + ranks * (kFarewellNbytes + slots * stride(slot_nbytes));
}

Lanes::Lanes(std::shared_ptr<Window> window, std::uint32_t slots, std::uint64_t slot_nbytes)
    : window_(std::move(window)),
      slots_(slots),
      slot_nbytes_(slot_nbytes),
      rank_(window_->rank().value_or(0)),
      waits_(counters_for("window", window_->name())),
      crowded_(window_->size() > usable_processors()),
      lanes_(window_->size()) {
  static_assert(sizeof(SlotHead) == kSlotHead && sizeof(Head) <= kHeadNbytes);
  if (slots_ < 2 || slot_nbytes_ < kLine || slot_nbytes_ % kLine != 0) {
    fail(ErrorKind::Bounds, "lanes need at least 2 slots of a multiple of ", kLine, " bytes, not ", slots_, " of ",
         slot_nbytes_);
  }
  const std::uint64_t needed = window_nbytes(size(), slots_, slot_nbytes_);
  if (window_->memory() == nullptr || window_->memory()->nbytes() < needed) {
    fail(ErrorKind::Bounds, "window '", window_->name(), "' is too small for lanes: they need ", needed, " bytes");
  }
  if (window_->memory()->control().signals() < kSharedSignals + kOriginSignals * size()) {
    fail(ErrorKind::Bounds, "window '", window_->name(), "' has too few signals for lanes");
  }
  for (Lane& lane : lanes_) lane.credit = slots_;
}

Lanes::Head& Lanes::head() const {
  return *static_cast<Head*>(window_->memory()->data());
}

std::uint64_t Lanes::slot_offset(unsigned origin, std::uint64_t chunk) const {
  return kHeadNbytes + size() * kFarewellNbytes +
         (std::uint64_t{origin} * slots_ + chunk % slots_) * stride(slot_nbytes_);
}

char* Lanes::slot_here(unsigned origin, std::uint64_t chunk) const {
  return static_cast<char*>(window_->memory()->data()) + slot_offset(origin, chunk);
}

std::uint64_t Lanes::signal(std::uint32_t index) const {
  return window_->memory()->control().signal(index).load(std::memory_order_seq_cst);
}

std::uint64_t Lanes::progress_of(unsigned rank, const Deadline& deadline) {
  std::uint64_t label = 0;
  How how;
  how.deadline = deadline;
  window_->target("progress_of", rank).read(&label, sizeof label, 0, how);
  return label;
}

// ---- A step ---------------------------------------------------------------------------------------------------------

void Lanes::step(const Step& step, std::span<const Move> moves) {
  std::vector<Running> running(moves.size());
  std::vector<Running*> last_sent(size()), last_received(size());
  Running* writer = nullptr;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const Move& move = moves[i];
    Running& one = running[i];
    one.move = &move;
    if (move.kind != Move::Kind::Combine) {
      if (move.rank >= size() || move.rank == rank_)
        fail(ErrorKind::Bounds, step.operation, ": rank ", move.rank, " is no other rank");
      Running*& last = (one.sends() ? last_sent : last_received)[move.rank];
      one.behind = last;
      last = &one;
    }
    if (one.sends()) continue;
    if (move.kind != Move::Kind::Receive) check_reducible(step.element, step.reduction);
    if (writer != nullptr && writer->move->into == move.into) one.after = writer;
    writer = &one;
  }
  check_ended(step.operation);
  head().label.store(step.label, std::memory_order_seq_cst);
  try {
    for (std::size_t left = running.size(); left > 0;) {
      bool went_on = false;
      for (Running& one : running) {
        if (one.over || !one.may_begin()) continue;
        went_on |= one.sends() ? send_some(step, one) : receive_some(step, one, one.open_until());
        left -= one.over ? 1 : 0;
      }
      if (!went_on && left > 0) wait_for_any(step, running);
    }
    for (const auto& work : works_) work->wait(step.deadline);
    works_.clear();
  } catch (...) {
    // Sources must not be read after this, and peers must not wait for what does not come.
    FirstFailure failure;
    failure.attempt([&] { throw; });
    for (const auto& work : works_) {
      try {
        work->wait(Deadline::after(0));
      } catch (const Error&) {  // it is over, which is all that is asked
      }
    }
    works_.clear();
    try {
      failure.rethrow();
    } catch (const Error& error) {
      end(error.kind(), error.what());
      throw;
    } catch (...) {
      end(ErrorKind::Onesided, text(step.operation, " was interrupted"));
      throw;
    }
  }
}

bool Lanes::send_some(const Step& step, Running& running) {
  const Move& move = *running.move;
  Lane& lane = lanes_[move.rank];
  if (lane.sent == lane.credit) lane.credit = slots_ + signal(credits_signal(move.rank));
  if (lane.sent == lane.credit) return false;
  Target& target = window_->target(step.operation, move.rank);
  const std::uint64_t nbytes = std::min(slot_nbytes_, move.nbytes - running.done);
  const std::uint64_t offset = slot_offset(rank_, lane.sent);
  const SlotHead head{step.label, move.nbytes};
  const Signal then{chunks_signal(rank_), 1};
  const char* const from = static_cast<const char*>(move.from) + running.done;
  How plain;
  plain.deadline = step.deadline;
  std::shared_ptr<Work> work;
  if (nbytes <= kShort) {
    char line[kLine];
    std::memcpy(line, &head, sizeof head);
    if (nbytes != 0) std::memcpy(line + kSlotHead, from, nbytes);
    work = target.write(line, kSlotHead + nbytes, offset, then, plain);
  } else {
    How how = plain;
    how.memory = move.memory;
    how.allocation = move.allocation;
    how.async = target.offloads();
    target.write(&head, sizeof head, offset, std::nullopt, plain);
    work = target.write(from, nbytes, offset + kLine, then, how);
  }
  if (work != nullptr) works_.push_back(std::move(work));
  ++lane.sent;
  running.done += nbytes;
  running.over = running.done == move.nbytes;
  return true;
}

bool Lanes::receive_some(const Step& step, Running& running, std::uint64_t open_until) {
  const Move& move = *running.move;
  const std::uint64_t nbytes = std::min(slot_nbytes_, move.nbytes - running.done);
  if (open_until < running.done + nbytes) return false;
  char* const into = static_cast<char*>(move.into) + running.done;
  const char* const operand = static_cast<const char*>(move.operand) + running.done;
  const std::size_t count = nbytes / element_nbytes(step.element);
  const auto go_on = [&] {
    running.done += nbytes;
    running.over = running.done == move.nbytes;
    return true;
  };
  if (move.kind == Move::Kind::Combine) {
    if (nbytes != 0)
      reduce(into, operand, static_cast<const char*>(move.from) + running.done, count, step.element, step.reduction);
    return go_on();
  }
  Lane& lane = lanes_[move.rank];
  if (!reached(signal(chunks_signal(move.rank)), lane.received + 1)) return false;
  const char* const slot = slot_here(move.rank, lane.received);
  SlotHead head;
  std::memcpy(&head, slot, sizeof head);
  if (head.label != step.label) {
    fail(ErrorKind::Onesided, step.operation, ": rank ", move.rank, " is in another operation (", head.label, ", here ",
         step.label, "): all ranks must issue the same operations in the same order, with the same types");
  }
  if (head.nbytes != move.nbytes) {
    fail(ErrorKind::Onesided, step.operation, ": rank ", move.rank, " sends ", head.nbytes,
         " bytes where this rank expects ", move.nbytes);
  }
  const char* const payload = slot + payload_offset(nbytes);
  if (nbytes == 0) {
  } else if (move.kind == Move::Kind::Receive) {
    std::memcpy(into, payload, nbytes);
  } else {
    reduce(into, operand, payload, count, step.element, step.reduction);
  }
  ++lane.received;
  give_credit(move.rank, false);
  return go_on();
}

// Every other chunk or so: a sender can go on with half of its slots.
void Lanes::give_credit(unsigned rank, bool all) {
  Lane& lane = lanes_[rank];
  const std::uint64_t owed = lane.received - lane.returned;
  if (owed < (all ? 1 : slots_ / 2)) return;
  Target& target = window_->target("credit", rank);
  try {
    target.signal(Signal{credits_signal(rank_), owed}, How{});
  } catch (const Error& error) {
    // It has left, and needs no credit; who waits for it will see.
    if (!target.peer().lost() && error.kind() != ErrorKind::StaleHandle && error.kind() != ErrorKind::RemoteAccess)
      throw;
  }
  lane.returned = lane.received;
}

void Lanes::wait_for_any(const Step& step, std::span<Running> moves) {
  std::vector<Wanted> wanted;
  std::vector<unsigned> ranks;
  for (const Running& one : moves) {
    if (one.over || !one.may_begin() || one.move->kind == Move::Kind::Combine) continue;
    const unsigned rank = one.move->rank;
    const Lane& lane = lanes_[rank];
    if (one.sends()) {
      wanted.push_back({credits_signal(rank), lane.sent + 1 - slots_});
    } else if (one.open_until() >= one.done + std::min(slot_nbytes_, one.move->nbytes - one.done)) {
      wanted.push_back({chunks_signal(rank), lane.received + 1});
    } else {
      continue;  // it waits for the one that it comes after, not for its rank
    }
    ranks.push_back(rank);
  }
  wanted.push_back({kEnds, 1});
  const auto named = [&] {
    std::string names;
    constexpr std::size_t kMostNamed = 8;
    std::vector<unsigned> all = ranks;
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    for (std::size_t i = 0; i < std::min(all.size(), kMostNamed); ++i)
      names += text(i == 0 ? "rank " : ", rank ", all[i]);
    return all.size() > kMostNamed ? names + text(" and ", all.size() - kMostNamed, " more") : names;
  };
  const auto watch = [&] {
    for (const unsigned rank : ranks) {
      const PeerState& peer = window_->target(step.operation, rank).peer();
      if (peer.lost()) peer.fail_lost(step.operation);
    }
  };
  try {
    wait_signals(*window_->memory(), *waits_, wanted, step.deadline, crowded_ ? std::chrono::nanoseconds(0) : kSpin,
                 "its peers", watch);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::DeadlineExceeded) throw;
    fail(ErrorKind::DeadlineExceeded, step.operation, ": the deadline passed while waiting for ", named());
  }
  check_ended(step.operation);
}

// ---- The end --------------------------------------------------------------------------------------------------------

bool Lanes::ended() const {
  const std::lock_guard lock(mutex_);
  return end_.has_value();
}

void Lanes::check_ended(const char* operation) {
  const std::lock_guard lock(mutex_);
  if (!end_ && signal(kEnds) != 0) {
    for (unsigned origin = 0; origin < size() && !end_; ++origin) {
      const char* const farewell =
          static_cast<const char*>(window_->memory()->data()) + kHeadNbytes + origin * kFarewellNbytes;
      const auto kind = static_cast<unsigned char>(farewell[0]);
      if (kind == 0 || kind > kErrorKinds) continue;
      const std::string_view said(farewell + 1, ::strnlen(farewell + 1, kFarewellNbytes - 1));
      end_.emplace(static_cast<ErrorKind>(kind - 1), text("rank ", origin, " has ended the communicator: ", said));
    }
  }
  if (end_) throw Error(end_->kind(), text(operation, ": ", end_->what()));
}

void Lanes::end(ErrorKind kind, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (end_) return;
    end_.emplace(kind, text("the communicator has ended: ", reason));
    if (signal(kEnds) != 0) return;  // everybody has been told by another rank
  }
  std::string farewell(1, static_cast<char>(static_cast<unsigned>(kind) + 1));
  farewell += reason.substr(0, kFarewellNbytes - 2);
  farewell += '\0';
  for (unsigned rank = 0; rank < size(); ++rank) {
    Target& target = window_->target("end", rank);
    How how;
    how.deadline = Deadline::after(kFarewellSeconds);
    try {
      if (!target.peer().lost()) {
        target.write(farewell.data(), farewell.size(), kHeadNbytes + rank_ * kFarewellNbytes, Signal{kEnds, 1}, how);
      }
    } catch (const Error&) {  // it is lost or has closed: whoever waits there has ended already
    }
  }
}

}  // namespace onesided
