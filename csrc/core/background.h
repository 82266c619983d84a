// The objects of the process's own that have threads.
#pragma once

#include <atomic>
#include <mutex>

#include "core/error.h"
#include "core/process.h"

namespace onesided {

// The one `Kind` of this process, with up to Kind::kThreads threads in Kind::run(). Made on first use, made anew in a forked
// child, where the parent's threads do not exist, and never destroyed: its threads may outlive static destructors. Throws
// if no thread can be started, and can be asked again.
template <class Kind>
Kind& background() {
  struct Made {
    Kind kind;
    const std::uint32_t in = fork_generation();
  };
  static std::atomic<Made*> present{nullptr};
  const auto usable = [](const Made* made) { return made != nullptr && made->in == fork_generation(); };
  if (Made* const made = present.load(); usable(made)) return made->kind;

  static std::mutex& making = []() -> std::mutex& {
    auto* const mutex = new std::mutex;
    hold_over_fork(*mutex);
    return *mutex;
  }();
  std::lock_guard lock(making);
  if (Made* const made = present.load(); usable(made)) return made->kind;
  auto* const made = new Made;
  unsigned started = 0;
  try {
    for (; started < Kind::kThreads; ++started) start_thread([made] { made->kind.run(); }).detach();
  } catch (const Error&) {
    if (started == 0) {
      delete made;
      throw;
    }
  }
  present.store(made);
  return made->kind;
}

}  // namespace onesided
