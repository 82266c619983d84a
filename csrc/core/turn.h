// One thread at a time in what may wait for peers: whoever comes second waits no longer than its own deadline says.
#pragma once

#include <atomic>
#include <string>

#include "core/deadline.h"
#include "core/error.h"
#include "core/event.h"

namespace onesided {

class Turn {
 public:
  // Has the turn while it lives. Throws DeadlineExceeded if another thread does not give it back in time.
  class Hold {
   public:
    Hold(Turn& turn, const char* operation, const Deadline& deadline) : turn_(turn) {
      if (turn.over_.await([&] { return !turn.taken_.exchange(true); }, deadline)) return;
      fail(ErrorKind::DeadlineExceeded, operation, ": another thread's call that has to be over first is not");
    }
    ~Hold() {
      turn_.taken_.store(false);
      turn_.over_.notify();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Turn& turn_;
  };

 private:
  std::atomic<bool> taken_{false};
  Event over_;
};

}  // namespace onesided
