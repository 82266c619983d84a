// Counters of what was done, by transport and peer. Counting costs one uncontended add; nobody reads until asked.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/owner.h"

namespace onesided {

enum class Count : unsigned {
  Puts,
  Gets,
  Signals,
  Atomics,
  Flushes,
  BytesPut,
  BytesGot,
  Copies,         // passes over payload bytes by the CPU
  Registrations,  // memory made known to a transport, and remote memory mapped
  CacheHits,      // a remote memory that was already mapped
  Waits,
  Sleeps,  // waits that outlasted their spin
  Errors,
};
inline constexpr std::array<const char*, 13> kCountNames{
    "puts",   "gets",          "signals",    "atomics", "flushes", "bytes_put", "bytes_got",
    "copies", "registrations", "cache_hits", "waits",   "sleeps",  "errors"};
static_assert(kCountNames.size() == static_cast<unsigned>(Count::Errors) + 1);

// The counters of one transport towards one peer; peer "" is the transport itself. Exact with any number of threads, and
// nearly free on the thread that counted first (see OwnedBy).
class Counters {
 public:
  void add(Count count, std::uint64_t n = 1) {
    const auto i = static_cast<unsigned>(count);
    if (owner_.is_me()) {
      owned_[i].store(owned_[i].load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
    } else {
      shared_[i].fetch_add(n, std::memory_order_relaxed);
    }
  }
  // Several at once, each a pair of Count and how many: asks only once who counts. On the path of every small put.
  template <class... Pairs>
  [[gnu::always_inline]] void add_all(const Pairs&... pairs) {
    if (owner_.is_me()) {
      const auto each = [this](Count count, std::uint64_t n) {
        auto& word = owned_[static_cast<unsigned>(count)];
        word.store(word.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
      };
      (each(pairs.first, pairs.second), ...);
    } else {
      (shared_[static_cast<unsigned>(pairs.first)].fetch_add(pairs.second, std::memory_order_relaxed), ...);
    }
  }
  std::uint64_t get(Count count) const {
    const auto i = static_cast<unsigned>(count);
    return owned_[i].load(std::memory_order_relaxed) + shared_[i].load(std::memory_order_relaxed);
  }

 private:
  OwnedBy owner_;
  std::array<std::atomic<std::uint64_t>, kCountNames.size()> owned_{};
  std::array<std::atomic<std::uint64_t>, kCountNames.size()> shared_{};
};

struct StatsRow {
  std::string transport;
  std::string peer;
  std::vector<std::pair<std::string, std::uint64_t>> counts;
};

// The counters for (transport, peer). They are shared by everything of that name and live until the process ends, so
// that what a closed connection has done is still told.
std::shared_ptr<Counters> counters_for(const std::string& transport, const std::string& peer);
std::vector<StatsRow> stats_snapshot();

}  // namespace onesided
