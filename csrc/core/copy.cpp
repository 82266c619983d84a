#include "core/copy.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <numeric>

#include "core/background.h"
#include "core/error.h"
#include "core/event.h"
#include "core/process.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace onesided {
namespace {

// ---- One thread ---------------------------------------------------------------------------------------------------

using CopyFunction = void (*)(char* target, const char* source, std::size_t nbytes);

void copy_plain(char* target, const char* source, std::size_t nbytes) {
  std::memcpy(target, source, nbytes);
}

#if defined(__x86_64__)
// Stores that go round the cache spare the read of each target line before it is overwritten (Intel optimization manual,
// "Non-temporal stores"). Walking several pages side by side keeps several DRAM pages and prefetch streams open: measured
// at twice the speed of one stream. The stores are weakly ordered: the fence at the end puts them before any later signal.
constexpr std::size_t kPage = 4096;
constexpr std::size_t kStreams = 8;

__attribute__((target("avx2"))) void stream_line(char* target, const char* source) {
  const auto* from = reinterpret_cast<const __m256i*>(source);
  auto* to = reinterpret_cast<__m256i*>(target);
  const __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
  _mm256_stream_si256(to, low);
  _mm256_stream_si256(to + 1, high);
}

__attribute__((target("avx512f"))) void stream_wide_line(char* target, const char* source) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
}

#define ONESIDED_COPY_STREAMING(name, feature, line)                                                      \
  __attribute__((target(feature))) void name(char* target, const char* source, std::size_t nbytes) {      \
    const std::size_t head = std::min(nbytes, (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64); \
    std::memcpy(target, source, head);                                                                    \
    std::size_t done = head;                                                                              \
    for (; done + kStreams * kPage <= nbytes; done += kStreams * kPage) {                                 \
      for (std::size_t at = done; at < done + kPage; at += 64) {                                          \
        for (std::size_t page = 0; page < kStreams * kPage; page += kPage) {                              \
          line(target + at + page, source + at + page);                                                   \
        }                                                                                                 \
      }                                                                                                   \
    }                                                                                                     \
    _mm_sfence();                                                                                         \
    std::memcpy(target + done, source + done, nbytes - done);                                             \
  }
// One loop for two instruction sets: a function inlines only into one that may use the same instructions.
ONESIDED_COPY_STREAMING(copy_streaming_avx2, "avx2", stream_line)
ONESIDED_COPY_STREAMING(copy_streaming_avx512, "avx512f", stream_wide_line)
#undef ONESIDED_COPY_STREAMING

CopyFunction streaming() {
  static const CopyFunction best = __builtin_cpu_supports("avx512f") ? copy_streaming_avx512
                                   : __builtin_cpu_supports("avx2")  ? copy_streaming_avx2
                                                                     : nullptr;
  return best;
}
#else
CopyFunction streaming() {
  return nullptr;
}
#endif

// ---- Two threads --------------------------------------------------------------------------------------------------

// One helper thread for the whole process. A copy is cut into slices: the caller takes them from the front, the helper
// from the back, until none is left. So a caller never waits for a helper that has not begun, one that comes late finds
// nothing left, and when the same memory is copied again, each finds its part in the cache of its own core.
class Helper {
 public:
  static constexpr unsigned kThreads = 1;

  // False if another thread is using the helper: the caller then copies alone.
  bool copy(CopyFunction function, char* target, const char* source, std::size_t nbytes) {
    std::unique_lock lock(in_use_, std::try_to_lock);
    if (!lock) return false;
    function_ = function, target_ = target, source_ = source, nbytes_ = nbytes;
    left_.store(static_cast<std::int64_t>((nbytes + kSlice - 1) / kSlice), std::memory_order_relaxed);
    finished_.store(false, std::memory_order_relaxed);
    if (const int here = ::sched_getcpu(); here != kept_off_) keep_off(here);
    state_.store(Offered);
    offer_.notify();
    for (std::size_t slice = 0; take_slice(); ++slice) copy_slice(slice);
    // Withdraws the offer. A helper that has accepted it is in its last slice, and is waited for even if Ctrl-C was
    // pressed: it still reads the source.
    if (state_.exchange(Idle) == Accepted) {
      for (int round = 0; round < kSpins && !finished_.load(); ++round) pause_cpu();
      finished_.wait(false);
    }
    return true;
  }

  void run() {
    thread_.store(::gettid());
    for (;;) {
      offer_.await([this] { return state_.load() == Offered; }, Deadline::never());
      std::uint32_t offered = Offered;
      if (!state_.compare_exchange_strong(offered, Accepted)) continue;
      for (std::size_t slice = (nbytes_ + kSlice - 1) / kSlice; take_slice();) copy_slice(--slice);
      finished_.store(true);
      finished_.notify_one();
    }
  }

 private:
  enum State : std::uint32_t { Idle, Offered, Accepted };

  // The scheduler likes to wake a thread where its waker runs, and there the helper would only take turns with it: measured
  // as copies at half the speed for milliseconds, until the scheduler balances. So it may run wherever the caller may,
  // except there.
  void keep_off(int processor) {
    const pid_t thread = thread_.load();
    cpu_set_t allowed;
    if (processor < 0 || thread == 0 || ::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    CPU_CLR(static_cast<std::size_t>(processor), &allowed);
    // Fails if nothing is left, or if the processors have changed: the helper stays where it may run.
    if (::sched_setaffinity(thread, sizeof allowed, &allowed) == 0) kept_off_ = processor;
  }

  bool take_slice() { return left_.fetch_sub(1, std::memory_order_relaxed) > 0; }

  void copy_slice(std::size_t slice) {
    const std::size_t begin = slice * kSlice;
    function_(target_ + begin, source_ + begin, std::min(kSlice, nbytes_ - begin));
  }

  static constexpr std::size_t kSlice = std::size_t{64} << 10;
  static constexpr int kSpins = 1000;  // a slice takes a few microseconds, a sleep 50

  std::mutex in_use_;
  std::atomic<pid_t> thread_{0};
  int kept_off_ = -1;
  std::atomic<std::uint32_t> state_{Idle};
  std::atomic<bool> finished_{false};
  Event offer_;
  CopyFunction function_ = nullptr;
  char* target_ = nullptr;
  const char* source_ = nullptr;
  std::size_t nbytes_ = 0;
  std::atomic<std::int64_t> left_{0};  // slices nobody has taken
};

// ---- Which method -------------------------------------------------------------------------------------------------

constexpr const char* kMethodNames[] = {"plain", "non-temporal", "plain on two threads", "non-temporal on two threads"};
constexpr unsigned kMethods = 4;
constexpr unsigned kTwoThreads = 2;  // methods from here on use the helper; the odd ones are non-temporal

// `method`, or the nearest to it that this machine has.
unsigned usable(unsigned method) {
  static const bool two = usable_processors() > 1;
  if (streaming() == nullptr) method &= ~1u;
  return two ? method : method % kTwoThreads;
}

// False as Helper::copy, and if there can be no helper.
bool copy_with_helper(CopyFunction function, char* target, const char* source, std::size_t nbytes) {
  try {
    return background<Helper>().copy(function, target, source, nbytes);
  } catch (const Error&) {
    return false;  // no thread can be started
  }
}

// False if it was meant for two threads but the helper was in use: that says nothing about the method's speed.
bool copy_by(unsigned method, char* target, const char* source, std::size_t nbytes) {
  const CopyFunction function = method % 2 == 1 ? streaming() : copy_plain;
  if (method >= kTwoThreads && copy_with_helper(function, target, source, nbytes)) return true;
  function(target, source, nbytes);
  return method < kTwoThreads;
}

constexpr const char* kClassNames[] = {"1-4 MiB", "4-16 MiB", "16 MiB"};
constexpr unsigned kClasses = 3;

unsigned class_of(std::size_t nbytes) {
  return nbytes < (std::size_t{4} << 20) ? 0 : nbytes < kPiece ? 1 : 2;
}

// Keeps, for each size class, how fast each method lately was, and says which to use next. Every real piece is a
// measurement, so nothing is spent on calibration and the choice follows the machine: memory that is touched for the
// first time, a second core that is busy, a virtual machine that has moved. After each method's first trial, one that was
// once faster and the others in turn are tried again whenever the time lost by trials is under its share of all time.
class Chooser {
 public:
  explicit Chooser(unsigned trial_length) : trial_length_(trial_length) {
    for (auto& recent : recent_) recent.resize(trial_length);
    hold_over_fork(mutex_);
  }

  unsigned next(std::size_t nbytes) {
    std::lock_guard lock(mutex_);
    if (trial_left_ == 0) {
      ++since_trial_;
      chosen_ = best();
      if (trials_ < kMethods) {
        trial_ = usable(trials_);
      } else {
        const unsigned candidate = trials_ % 2 == 0 ? promising() : usable(trials_ / 2 % kMethods);
        if (since_trial_ < kShortestWait || !affordable(candidate, nbytes)) return chosen_;
        trial_ = candidate;
      }
      ++trials_;
      since_trial_ = 0;
      trial_left_ = trial_length_;
    }
    --trial_left_;
    return trial_;
  }

  void record(unsigned method, std::size_t nbytes, double nanoseconds) {
    std::lock_guard lock(mutex_);
    if (method != chosen_ && speed(chosen_) > 0) {
      lost_ += std::max(0.0, nanoseconds - static_cast<double>(nbytes) / speed(chosen_));
    }
    copied_ += nanoseconds;
    if (copied_ > kHorizon) copied_ /= 2, lost_ /= 2;
    auto& recent = recent_[method];
    recent[tries_[method]++ % recent.size()] = static_cast<double>(nbytes) / nanoseconds;
    if (tries_[method] >= recent.size()) ever_[method] = std::max(ever_[method], speed(method));
  }

  void report(const char* sizes, std::vector<CopyMeasurement>& rows) {
    std::lock_guard lock(mutex_);
    for (unsigned method = 0; method < kMethods; ++method) {
      if (tries_[method] != 0) rows.push_back({sizes, kMethodNames[method], speed(method), method == best()});
    }
  }

 private:
  // The mean of the last tries without the slowest, which noise has spoilt. Not the fastest: two threads now and then find
  // the helper awake, and it is what they mostly do that counts.
  double speed(unsigned method) const {
    const auto& recent = recent_[method];
    const double worst = *std::min_element(recent.begin(), recent.end());
    return (std::accumulate(recent.begin(), recent.end(), 0.0) - worst) / (static_cast<double>(recent.size()) - 1);
  }

  unsigned best() const {
    unsigned best = 0;
    for (unsigned method = 1; method < kMethods; ++method) {
      // A helper thread costs somebody else's core: it must earn it.
      const double handicap = method >= kTwoThreads && best < kTwoThreads ? 1.05 : 1.0;
      if (speed(method) > speed(best) * handicap) best = method;
    }
    return best;
  }

  // Of those that are not chosen, the one that has once been fastest.
  unsigned promising() const {
    unsigned found = chosen_ == 0 ? 1 : 0;
    for (unsigned method = 0; method < kMethods; ++method) {
      if (method != chosen_ && ever_[method] > ever_[found]) found = method;
    }
    return usable(found);
  }

  // Whether a trial that goes as the last one of this method went keeps the losses within their share.
  bool affordable(unsigned method, std::size_t nbytes) const {
    if (speed(method) == 0) return true;
    const double each = static_cast<double>(nbytes) * (1 / speed(method) - 1 / speed(chosen_));
    return lost_ + trial_length_ * std::max(0.0, each) <= copied_ * kShare;
  }

  static constexpr unsigned kShortestWait = 16;
  static constexpr double kShare = 1.0 / 64;
  static constexpr double kHorizon = 2e9;  // nanoseconds; what is longer ago than a few of these counts little

  // A trial is that many pieces one after the other: enough to forget what was, and to have the helper awake.
  const unsigned trial_length_;
  std::mutex mutex_;
  std::array<std::vector<double>, kMethods> recent_;
  std::array<double, kMethods> ever_{};
  std::array<unsigned, kMethods> tries_{};
  double copied_ = 0;  // nanoseconds
  double lost_ = 0;    // of these, by trials of methods that were slower than the best
  unsigned trials_ = 0;
  unsigned since_trial_ = 0;
  unsigned trial_ = 0;  // the method that is tried
  unsigned trial_left_ = 0;
  unsigned chosen_ = 0;
};

Chooser& chooser(unsigned size_class) {
  static auto* const choosers = new std::array<Chooser, kClasses>{Chooser{16}, Chooser{8}, Chooser{4}};
  return (*choosers)[size_class];
}

// From the start: a fork while another thread makes it would leave a child that waits for that thread.
[[maybe_unused]] const auto& from_the_start = chooser(0);

void copy_piece(char* target, const char* source, std::size_t nbytes) {
  Chooser& choice = chooser(class_of(nbytes));
  const unsigned method = choice.next(nbytes);
  const auto begin = std::chrono::steady_clock::now();
  if (!copy_by(method, target, source, nbytes)) return;
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  choice.record(method, nbytes, std::max(took.count(), 1.0));
}

bool overlap(const char* a, const char* b, std::size_t nbytes) {
  return a < b + nbytes && b < a + nbytes;
}

// For ranges that overlap: piece by piece from that end at which nothing is overwritten before it is read.
void move_memory(char* target, const char* source, std::size_t nbytes, Checkpoint* between_pieces) {
  const bool forwards = target < source;
  while (nbytes > 0) {
    const std::size_t piece = std::min(nbytes, kPiece);
    if (between_pieces != nullptr && nbytes >= kLargeCopy) between_pieces->pass();
    const std::size_t at = forwards ? 0 : nbytes - piece;
    std::memmove(target + at, source + at, piece);
    nbytes -= piece;
    if (forwards) target += piece, source += piece;
  }
}

}  // namespace

void copy_memory(void* target_bytes, const void* source_bytes, std::size_t nbytes, Checkpoint* between_pieces) {
  auto* target = static_cast<char*>(target_bytes);
  const auto* source = static_cast<const char*>(source_bytes);
  if (nbytes == 0) return;
  if (overlap(target, source, nbytes)) {
    move_memory(target, source, nbytes, between_pieces);
    return;
  }
  while (nbytes >= kLargeCopy) {
    const std::size_t piece = std::min(nbytes, kPiece);
    if (between_pieces != nullptr) between_pieces->pass();
    copy_piece(target, source, piece);
    target += piece, source += piece, nbytes -= piece;
  }
  copy_plain(target, source, nbytes);
}

std::vector<CopyMeasurement> copy_measurements() {
  std::vector<CopyMeasurement> rows;
  for (unsigned size_class = 0; size_class < kClasses; ++size_class) {
    chooser(size_class).report(kClassNames[size_class], rows);
  }
  return rows;
}

std::vector<std::string> copy_methods() {
  std::vector<std::string> names;
  for (unsigned method = 0; method < kMethods; ++method) {
    if (usable(method) == method) names.push_back(kMethodNames[method]);
  }
  return names;
}

void copy_memory_by(const std::string& method, void* target, const void* source, std::size_t nbytes) {
  const auto named = std::find(std::begin(kMethodNames), std::end(kMethodNames), method);
  if (named == std::end(kMethodNames)) fail(ErrorKind::Unsupported, "no copy method is called '", method, "'");
  copy_by(usable(static_cast<unsigned>(named - kMethodNames)), static_cast<char*>(target),
          static_cast<const char*>(source), nbytes);
}

}  // namespace onesided
