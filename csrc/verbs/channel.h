// The queue pairs from this process to one peer, in one generation: what was posted, what is complete, and how it ended.
//
// Everything that is posted on a queue pair completes in the order it was posted (InfiniBand specification, reliable
// connection). So a work request is known by its number alone: it is over when a completion with that number or a higher
// one was seen, and few of them need to ask for a completion.
#pragma once

#include "verbs/device.h"

#if ONESIDED_HAS_VERBS
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/event.h"
#include "core/transport.h"
#include "verbs/registration.h"

namespace onesided::verbs {

inline constexpr std::size_t kMostLanes = kMostRails;

// What one end of a queue pair tells the other.
struct QueueAddress {
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;  // ibv_mtu
  std::uint32_t number = 0;
  std::uint32_t first_packet = 0;  // packet sequence number, 24 bits
  std::uint8_t reads = 1;          // reads and atomics of the peer that are answered at once
};

// Options of a connection, with what they mean for its user.
struct Tuning {
  // Work requests that may be under way on one queue pair; who posts more waits.
  unsigned depth = 512;
  // An unanswered packet is sent again after 4.096 us * 2^timeout; `retries` times, then the operation fails. 14 and 6 are
  // about 0.5 s for a peer that has vanished. 7 retries would be for ever on some devices, and is refused.
  unsigned timeout = 14;
  unsigned retries = 6;
  unsigned mtu = 0;  // bytes: 256 to 4096; 0 for what both ports have
  unsigned traffic_class = 0;
  unsigned service_level = 0;
};

// One queue pair as a passive end has it: it answers the device of the peer and posts nothing.
class Responder {
 public:
  Responder(std::shared_ptr<Device> device, const Rail& rail, const Tuning& tuning);
  ~Responder();
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;
  QueueAddress address() const { return address_; }
  void accept(const QueueAddress& peer);

 private:
  const std::shared_ptr<Device> device_;
  const Rail rail_;
  const Tuning tuning_;
  ibv_cq* queue_ = nullptr;  // nothing ever completes there
  ibv_qp* pair_ = nullptr;
  QueueAddress address_;
};

// A mutex whose uncontended lock and unlock are two instructions each. Those of std::mutex are calls: 60 instructions, a quarter
// of a small put.
class PostLock {
 public:
  // Lets go of a lock that is held, while it lives.
  class Aside {
   public:
    explicit Aside(PostLock& lock) : lock_(lock) { lock.unlock(); }
    ~Aside() { lock_.lock(); }
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

   private:
    PostLock& lock_;
  };

  void lock() {
    if (!try_lock()) [[unlikely]]
      wait();
  }
  bool try_lock() {
    unsigned state = kFree;
    return state_.compare_exchange_strong(state, kHeld, std::memory_order_acquire);
  }
  void unlock() {
    if (state_.exchange(kFree, std::memory_order_release) == kContended) [[unlikely]]
      wake();
  }

 private:
  [[gnu::noinline]] void wait() {
    while (state_.exchange(kContended, std::memory_order_acquire) != kFree) state_.wait(kContended);
  }
  [[gnu::noinline]] void wake() { state_.notify_one(); }

  static constexpr unsigned kFree = 0, kHeld = 1, kContended = 2;  // somebody may sleep
  std::atomic<unsigned> state_{kFree};
};

// The last work request of an operation on each lane it used; 0 on the others.
using Ticket = std::array<std::uint64_t, kMostLanes>;

class Channel {
 public:
  // No work request is larger: between two of them a deadline and Ctrl-C are looked at, as a software device sends while it is
  // posted to.
  static constexpr std::uint32_t kLongestPart = 64 << 20;
  // Payloads up to this many bytes are copied out of the source when they are posted, so that it can be reused at once.
  static constexpr std::uint32_t kStaged = 4096;

  struct LanePlan {
    std::shared_ptr<Device> device;
    Rail rail;
    std::size_t local_rail;   // index among this transport's rails: picks the lkey
    std::size_t remote_rail;  // index among the peer's: picks the rkey
  };

  // Throws what the system said if a queue cannot be had.
  Channel(std::vector<LanePlan> lanes, const Tuning& tuning, std::string peer, std::uint32_t generation);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  std::vector<QueueAddress> addresses() const;
  void connect(const std::vector<QueueAddress>& peers);

  std::uint32_t generation() const { return generation_; }
  std::size_t lanes() const { return lanes_.size(); }
  std::size_t local_rail(std::size_t lane) const { return lanes_[lane]->plan.local_rail; }
  std::size_t remote_rail(std::size_t lane) const { return lanes_[lane]->plan.remote_rail; }
  std::uint32_t longest_message() const { return longest_message_; }
  std::uint64_t bytes_posted(std::size_t lane) const { return lanes_[lane]->bytes.load(std::memory_order_relaxed); }
  std::string lane_name(std::size_t lane) const { return lanes_[lane]->plan.rail.port.name(); }

  // ---- Posting: returns the number of the last work request ------------------------------------------------------
  //
  // Each waits for room until the deadline, then throws DeadlineExceeded with nothing posted. Throws the cause if the channel
  // has ended.

  struct Word {
    std::uint64_t address;
    std::uint32_t key;
    std::uint64_t add;
  };
  // 1 to kStaged bytes, and a signal behind them with the same doorbell. `source` is not read afterwards.
  std::uint64_t write_staged(std::size_t lane, const void* source, std::uint32_t nbytes, std::uint64_t address,
                             std::uint32_t key, const Word* signal, bool signaled, const Deadline& deadline);
  // The same on lane 0, without a signal or a completion of its own.
  std::uint64_t write_small(const void* source, std::uint32_t nbytes, std::uint64_t address, std::uint32_t key,
                            const Deadline& deadline);
  std::uint64_t write(std::size_t lane, const void* source, std::uint32_t nbytes, std::uint32_t lkey,
                      std::uint64_t address, std::uint32_t key, const Word* signal, bool signaled,
                      const Deadline& deadline);
  std::uint64_t read(std::size_t lane, void* destination, std::uint32_t nbytes, std::uint32_t lkey,
                     std::uint64_t address, std::uint32_t key, bool signaled, const Deadline& deadline);
  std::uint64_t signal(std::size_t lane, const Word& signal, bool signaled, const Deadline& deadline);
  // Both leave what the word held in `slot` (see Slot), signaled.
  std::uint64_t fetch_add(std::size_t lane, unsigned slot, const Word& word, const Deadline& deadline);
  std::uint64_t compare_swap(std::size_t lane, unsigned slot, std::uint64_t address, std::uint32_t key,
                             std::uint64_t expected, std::uint64_t desired, const Deadline& deadline);
  // Nothing, signaled: when it is complete, so is all before it. If the last request asks for a completion already, that one.
  std::uint64_t marker(std::size_t lane, const Deadline& deadline);
  // The same, always a new one: it is complete when the peer's device has answered.
  std::uint64_t probe(std::size_t lane, const Deadline& deadline);

  // A piece of registered memory of the channel's own, of kStaged bytes, for what comes back.
  class Slot {
   public:
    Slot(Channel& channel, const Deadline& deadline);
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    unsigned index() const { return index_; }
    char* data() const { return channel_.slot_data(index_); }
    std::uint32_t lkey(std::size_t lane) const { return channel_.staging_key(lane, data()); }

   private:
    friend class Channel;
    Channel& channel_;
    unsigned index_;
  };

  // ---- Completion ---------------------------------------------------------------------------------------------------

  bool complete(const Ticket& ticket) const {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (lanes_[lane]->completed.load(std::memory_order_acquire) < ticket[lane]) return false;
    }
    return true;
  }
  bool complete(std::size_t lane, std::uint64_t number) const {
    return lanes_[lane]->completed.load(std::memory_order_acquire) >= number;
  }
  // Takes what is there. Returns false if another thread is at it.
  bool poll();
  // If a completion told of an error: the rest of end().
  void end_if_failed() {
    if (failed_.load(std::memory_order_acquire) && !ended()) end(kind_, cause());
  }
  // Waits until the ticket is complete or the channel has ended (as it does when the peer is lost); false at the deadline.
  bool await(const Ticket& ticket, const Deadline& deadline);

  // Where the error was that ended the channel, if a completion told of it.
  std::optional<std::size_t> failed_lane() const {
    std::lock_guard lock(cause_mutex_);
    return failed_lane_;
  }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  std::string cause() const;
  ErrorKind end_kind() const {
    std::lock_guard lock(cause_mutex_);
    return kind_;
  }
  // True if a deadline of the caller's ended it, and not the way to the peer.
  bool ended_by_deadline() const {
    std::lock_guard lock(cause_mutex_);
    return kind_ == ErrorKind::DeadlineExceeded;
  }
  // For an operation `what` whose work requests are those from `first` to `last` and not all complete: the cause itself if
  // one of them failed; else, that they were flushed because of it.
  Error error_for(const char* what, const Ticket& first, const Ticket& last) const;

  // The end of this generation: no source is read and no destination is written any more when it returns. `kind` and
  // `cause` are told to everybody whose operation was not complete; the first call decides. Waits for the flush of what was
  // under way, unless no completions come any more.
  void end(ErrorKind kind, const std::string& cause, bool completions_come = true);
  bool uses(const ibv_qp* pair) const;
  bool uses(const ibv_cq* queue) const;
  bool uses(const ibv_context* context, int port) const;

  // Holds `keep` until the ticket is complete or the channel has ended.
  void keep_until(const Ticket& ticket, Keepalive keep, std::shared_ptr<void> registration);

 private:
  struct Lane {
    LanePlan plan;
    ibv_cq* queue = nullptr;
    ibv_comp_channel* events = nullptr;
    ibv_qp* pair = nullptr;
    const ibv_qp* made_pair = nullptr;  // the same, also after they are gone: for asking which they were
    const ibv_cq* made_queue = nullptr;
    QueueAddress address;
    unsigned inline_nbytes = 0;
    std::uint64_t posted = 0;  // with post_lock_
    std::uint64_t asked = 0;   // the last that asks for a completion; with post_lock_
    std::atomic<std::uint64_t> completed{0};
    std::atomic<std::uint64_t> bytes{0};
    unsigned unacknowledged = 0;  // completion events; with sleep_mutex_
    bool flushing = false;        // an error was seen: what comes after did not happen; with poll_mutex_
    bool flushed = false;         // the marker of end() came
  };
  struct Kept {
    Ticket ticket;
    Keepalive keep;
    std::shared_ptr<void> registration;
  };

  void make(Lane& lane);
  void destroy_queues();
  void make_room(Lane& lane, unsigned requests, const Deadline& deadline);
  void wait_for_room(Lane& lane, unsigned requests, const Deadline& deadline);
  std::uint64_t post(Lane& lane, ibv_send_wr* first, ibv_send_wr* last, unsigned requests, std::uint64_t nbytes,
                     bool signaled);
  std::uint64_t post_with_signal(std::size_t lane, ibv_send_wr& request, const Word& signal, std::uint64_t nbytes,
                                 bool signaled);
  std::uint64_t write_inline(std::size_t lane, const void* source, std::uint32_t nbytes, std::uint64_t address,
                             std::uint32_t key, const Word* signal, bool signaled, const Deadline& deadline);
  std::uint64_t write_from_ring(std::size_t lane, const void* source, std::uint32_t nbytes, std::uint64_t address,
                                std::uint32_t key, const Word* signal, bool signaled, const Deadline& deadline);
  [[noreturn]] void fail_refused(const Lane& lane, int error);
  [[noreturn]] void fail_ended(const char* what) const;
  bool poll_lane(std::size_t index);
  void on_error(std::size_t lane, const ibv_wc& completion);
  void arm();
  void take_events();
  bool sleep(std::chrono::nanoseconds at_most);
  void let_go(std::vector<Kept>& over);
  char* slot_data(unsigned index) const { return staging_ + std::size_t{kRing + index} * kStaged; }
  std::uint32_t staging_key(std::size_t lane, const char* data) const {
    return staging_keys_->lkey(lanes_[lane]->plan.local_rail, static_cast<std::uint64_t>(data - staging_));
  }

  static constexpr unsigned kRing = 64;   // staged writes under way
  static constexpr unsigned kSlots = 64;  // reads and atomics under way
  static constexpr unsigned kBatch = 16;

  const std::string peer_;
  const std::uint32_t generation_;
  const Tuning tuning_;
  std::uint32_t longest_message_ = 0;
  std::uint32_t depth_ = 0;
  std::vector<std::unique_ptr<Lane>> lanes_;

  char* staging_ = nullptr;
  std::unique_ptr<Registration> staging_keys_;
  unsigned ring_next_ = 0;
  std::array<std::uint64_t, kRing> ring_used_{};  // by lane 0's numbers, with post_lock_
  std::array<std::uint8_t, kRing> ring_lane_{};

  std::mutex slots_mutex_;
  std::vector<unsigned> free_slots_;
  Event slot_freed_;

  mutable PostLock post_lock_;
  std::mutex poll_mutex_;
  std::mutex sleep_mutex_;  // held by the one waiter that sleeps on the completion channels
  Event progress_;
  std::atomic<std::uint64_t> progressed_{0};

  std::atomic<bool> failed_{false};  // an error was seen; end() follows
  std::atomic<bool> ended_{false};
  mutable std::mutex cause_mutex_;
  ErrorKind kind_ = ErrorKind::ConnectionLost;
  std::string cause_;
  std::optional<std::size_t> failed_lane_;
  std::uint64_t failed_number_ = 0;
  std::mutex end_mutex_;

  mutable std::mutex kept_mutex_;
  std::deque<Kept> kept_;
  std::atomic<std::size_t> kept_count_{0};
};

}  // namespace onesided::verbs
#endif
