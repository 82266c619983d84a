#include "collectives/inboxes.h"

#include <algorithm>
#include <cstring>

#include "core/process.h"

namespace onesided {

namespace {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kHeadNbytes = kLine;
constexpr std::uint64_t kFarewellNbytes = 4 * kLine;
constexpr double kFarewellSeconds = 0.2;  // for telling one peer: others are told after it

// So few bytes as fit the cache line of their head follow it at once, others in the next line.
constexpr std::uint64_t kShort = kLine - sizeof(ChunkHead);

std::uint64_t payload_offset(std::uint64_t chunk_nbytes) {
  return chunk_nbytes <= kShort ? sizeof(ChunkHead) : kLine;
}

std::uint64_t stride(std::uint64_t slot_nbytes) {
  return kLine + (slot_nbytes + kLine - 1) / kLine * kLine;
}

}  // namespace

// What begins the window of each rank. Behind it, for every origin: why it has ended them.
struct Inboxes::Head {
  std::atomic<std::uint64_t> told;
};

std::uint64_t Inboxes::window_nbytes(unsigned ranks, std::uint32_t slots, std::uint64_t slot_nbytes) {
  return kHeadNbytes + ranks * (kFarewellNbytes + slots * stride(slot_nbytes));
}

Inboxes::Inboxes(std::shared_ptr<Window> window, std::uint32_t slots, std::uint64_t slot_nbytes)
    : window_(std::move(window)),
      slots_(slots),
      slot_nbytes_(slot_nbytes),
      rank_(window_->rank().value_or(0)),
      waits_(counters_for("window", window_->name())),
      crowded_(window_->size() > usable_processors()),
      streams_(window_->size()) {
  static_assert(sizeof(Head) <= kHeadNbytes);
  if (slots_ < 2 || slot_nbytes_ < kLine || slot_nbytes_ % kLine != 0) {
    fail(ErrorKind::Bounds, "inboxes need at least 2 slots of a multiple of ", kLine, " bytes, not ", slots_, " of ",
         slot_nbytes_);
  }
  const std::uint64_t needed = window_nbytes(size(), slots_, slot_nbytes_);
  if (window_->memory() == nullptr || window_->memory()->nbytes() < needed) {
    fail(ErrorKind::Bounds, "window '", window_->name(), "' is too small for inboxes: they need ", needed, " bytes");
  }
  if (window_->memory()->control().signals() < kSharedSignals + kOriginSignals * size()) {
    fail(ErrorKind::Bounds, "window '", window_->name(), "' has too few signals for inboxes");
  }
  for (Stream& stream : streams_) stream.credit = slots_;
}

Inboxes::Head& Inboxes::head_here() const {
  return *static_cast<Head*>(window_->memory()->data());
}

std::uint64_t Inboxes::slot_offset(unsigned origin, std::uint64_t chunk) const {
  return kHeadNbytes + size() * kFarewellNbytes +
         (std::uint64_t{origin} * slots_ + chunk % slots_) * stride(slot_nbytes_);
}

const char* Inboxes::slot_here(unsigned origin, std::uint64_t chunk) const {
  return static_cast<const char*>(window_->memory()->data()) + slot_offset(origin, chunk);
}

std::uint64_t Inboxes::signal(std::uint32_t index) const {
  return window_->memory()->control().signal(index).load(std::memory_order_seq_cst);
}

// ---- Chunks ---------------------------------------------------------------------------------------------------------

bool Inboxes::may_send(unsigned rank) {
  Stream& stream = streams_[rank];
  if (stream.sent == stream.credit) stream.credit = slots_ + signal(credits_signal(rank));
  return stream.sent != stream.credit;
}

std::shared_ptr<Work> Inboxes::send(const char* operation, unsigned rank, const ChunkHead& head, const void* from,
                                    std::uint64_t nbytes, How how) {
  Stream& stream = streams_[rank];
  Target& target = window_->target(operation, rank);
  const std::uint64_t offset = slot_offset(rank_, stream.sent);
  const Signal then{chunks_signal(rank_), 1};
  How plain;
  plain.deadline = how.deadline;
  std::shared_ptr<Work> work;
  if (nbytes <= kShort) {
    char line[kLine];
    std::memcpy(line, &head, sizeof head);
    if (nbytes != 0) std::memcpy(line + sizeof head, from, nbytes);
    work = target.write(line, sizeof head + nbytes, offset, then, plain);
  } else {
    how.async = how.async && target.offloads();
    target.write(&head, sizeof head, offset, std::nullopt, plain);
    work = target.write(from, nbytes, offset + kLine, then, how);
  }
  ++stream.sent;
  return work;
}

bool Inboxes::arrived(unsigned rank) const {
  return reached(signal(chunks_signal(rank)), streams_[rank].received + 1);
}

ChunkHead Inboxes::head(unsigned rank) const {
  ChunkHead head;
  std::memcpy(&head, slot_here(rank, streams_[rank].received), sizeof head);
  return head;
}

const char* Inboxes::payload(unsigned rank, std::uint64_t nbytes) const {
  return slot_here(rank, streams_[rank].received) + payload_offset(nbytes);
}

// Credit goes back every other chunk or so: a sender can go on with half of its slots.
void Inboxes::take(unsigned rank) {
  Stream& stream = streams_[rank];
  ++stream.received;
  const std::uint64_t owed = stream.received - stream.returned;
  if (owed < slots_ / 2) return;
  Target& target = window_->target("credit", rank);
  try {
    target.signal(Signal{credits_signal(rank_), owed}, How{});
  } catch (const Error& error) {
    // It has left, and needs no credit; who waits for it will see.
    if (!target.peer().lost() && error.kind() != ErrorKind::StaleHandle && error.kind() != ErrorKind::RemoteAccess)
      throw;
  }
  stream.returned = stream.received;
}

Wanted Inboxes::room(unsigned rank) const {
  return {credits_signal(rank), streams_[rank].sent + 1 - slots_};
}

Wanted Inboxes::arrival(unsigned rank) const {
  return {chunks_signal(rank), streams_[rank].received + 1};
}

void Inboxes::wait(std::span<const Wanted> wanted, const Deadline& deadline, const std::function<void()>& watch) {
  std::vector<Wanted> all(wanted.begin(), wanted.end());
  all.push_back({kEnds, 1});
  wait_signals(*window_->memory(), *waits_, all, deadline, crowded_ ? std::chrono::nanoseconds(0) : kSpin, "its peers",
               watch);
}

void Inboxes::wake_up() {
  window_->target("wake", rank_).signal(Signal{kWakes, 1}, How{});
}

// ---- Any thread -----------------------------------------------------------------------------------------------------

void Inboxes::fail_lost(const char* operation, unsigned rank) const {
  window_->target(operation, rank).peer().fail_lost(operation);
}

void Inboxes::tell(std::uint64_t word) {
  head_here().told.store(word, std::memory_order_seq_cst);
}

std::uint64_t Inboxes::told_by(unsigned rank, const Deadline& deadline) {
  std::uint64_t word = 0;
  How how;
  how.deadline = deadline;
  window_->target("progress_of", rank).read(&word, sizeof word, 0, how);
  return word;
}

bool Inboxes::ended() const {
  const std::lock_guard lock(mutex_);
  return end_.has_value();
}

void Inboxes::check_ended(const char* operation) {
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

void Inboxes::check_ended_after(const Error& error, const char* operation) {
  check_ended(operation);
  if (error.kind() != ErrorKind::StaleHandle && error.kind() != ErrorKind::RemoteAccess &&
      error.kind() != ErrorKind::ConnectionLost) {
    return;
  }
  try {
    wait({}, Deadline::after(kFarewellSeconds), [] {});
  } catch (const Error&) {  // nobody has told
    return;
  }
  check_ended(operation);
}

void Inboxes::end(ErrorKind kind, const std::string& reason) {
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
