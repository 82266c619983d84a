#include "collectives/lanes.h"

#include <algorithm>
#include <cstring>

namespace onesided {

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

// ---- A step ---------------------------------------------------------------------------------------------------------

void Lanes::step(const Step& step, std::span<const Move> moves) {
  std::vector<Running> running(moves.size());
  std::vector<Running*> last_sent(inboxes_->size()), last_received(inboxes_->size());
  Running* writer = nullptr;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const Move& move = moves[i];
    Running& one = running[i];
    one.move = &move;
    if (move.kind != Move::Kind::Combine) {
      if (move.rank >= inboxes_->size() || move.rank == inboxes_->rank())
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
  inboxes_->check_ended(step.operation);
  inboxes_->tell(step.label);
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
      inboxes_->check_ended_after(error, step.operation);
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
  if (!inboxes_->may_send(move.rank)) return false;
  const std::uint64_t nbytes = std::min(inboxes_->slot_nbytes(), move.nbytes - running.done);
  How how;
  how.deadline = step.deadline;
  how.memory = move.memory;
  how.allocation = move.allocation;
  how.async = true;
  auto work = inboxes_->send(step.operation, move.rank, {step.label, move.nbytes},
                             static_cast<const char*>(move.from) + running.done, nbytes, std::move(how));
  if (work != nullptr) works_.push_back(std::move(work));
  running.done += nbytes;
  running.over = running.done == move.nbytes;
  return true;
}

bool Lanes::receive_some(const Step& step, Running& running, std::uint64_t open_until) {
  const Move& move = *running.move;
  const std::uint64_t nbytes = std::min(inboxes_->slot_nbytes(), move.nbytes - running.done);
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
  if (!inboxes_->arrived(move.rank)) return false;
  const ChunkHead head = inboxes_->head(move.rank);
  if (head.label != step.label) {
    fail(ErrorKind::Onesided, step.operation, ": rank ", move.rank, " is in another operation (", head.label, ", here ",
         step.label, "): all ranks must issue the same operations in the same order, with the same types");
  }
  if (head.nbytes != move.nbytes) {
    fail(ErrorKind::Onesided, step.operation, ": rank ", move.rank, " sends ", head.nbytes,
         " bytes where this rank expects ", move.nbytes);
  }
  const char* const payload = inboxes_->payload(move.rank, nbytes);
  if (nbytes == 0) {
  } else if (move.kind == Move::Kind::Receive) {
    std::memcpy(into, payload, nbytes);
  } else {
    reduce(into, operand, payload, count, step.element, step.reduction);
  }
  inboxes_->take(move.rank);
  return go_on();
}

void Lanes::wait_for_any(const Step& step, std::span<Running> moves) {
  std::vector<Wanted> wanted;
  std::vector<unsigned> ranks;
  for (const Running& one : moves) {
    if (one.over || !one.may_begin() || one.move->kind == Move::Kind::Combine) continue;
    const unsigned rank = one.move->rank;
    if (one.sends()) {
      wanted.push_back(inboxes_->room(rank));
    } else if (one.open_until() >= one.done + std::min(inboxes_->slot_nbytes(), one.move->nbytes - one.done)) {
      wanted.push_back(inboxes_->arrival(rank));
    } else {
      continue;  // it waits for the one that it comes after, not for its rank
    }
    ranks.push_back(rank);
  }
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
  try {
    inboxes_->wait(wanted, step.deadline, [&] {
      for (const unsigned rank : ranks) {
        if (inboxes_->lost(rank)) inboxes_->fail_lost(step.operation, rank);
      }
    });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::DeadlineExceeded) throw;
    fail(ErrorKind::DeadlineExceeded, step.operation, ": the deadline passed while waiting for ", named());
  }
  inboxes_->check_ended(step.operation);
}

}  // namespace onesided
