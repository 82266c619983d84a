// What a small put must not do on its way to the device: allocate, and call the system. tests/test_put_cost.py counts its
// instructions, and the same from Python. Not with sanitizers: they replace operator new, and call the system themselves.
#include "verbs/transport.h"

#if ONESIDED_HAS_VERBS && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include <cstdlib>
#include <new>

#include "tests/fake_verbs.h"
#include "tests/support.h"
#include "verbs/target.h"

namespace {
thread_local std::uint64_t allocations = 0;
}

void* operator new(std::size_t nbytes) {
  ++allocations;
  if (void* const made = std::malloc(nbytes != 0 ? nbytes : 1)) return made;
  throw std::bad_alloc();
}
void operator delete(void* made) noexcept {
  std::free(made);
}
void operator delete(void* made, std::size_t) noexcept {
  std::free(made);
}

namespace onesided::tests {
namespace {

// While it lives, the first system call of this thread is noted, by the kernel's own hand: see "Syscall User Dispatch" in its
// documentation (Linux 5.11).
class SystemCalls {
 public:
  SystemCalls() {
    struct sigaction action{};
    action.sa_sigaction = note;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSYS, &action, &before_);
    seen_ = -1;
    works_ = ::prctl(kDispatch, kOn, 0, 0, &blocked_) == 0;
    if (works_) blocked_ = 1;
  }
  ~SystemCalls() {
    blocked_ = 0;
    if (works_) ::prctl(kDispatch, kOff, 0, 0, nullptr);
    ::sigaction(SIGSYS, &before_, nullptr);
  }
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;

  bool works() const { return works_; }
  // Its number, or -1.
  int first() const { return seen_; }

 private:
  static constexpr int kDispatch = 59, kOff = 0, kOn = 1;  // PR_SET_SYSCALL_USER_DISPATCH

  static void note(int, siginfo_t* info, void* context) {
    blocked_ = 0;
    seen_ = info->si_syscall;
    // It was held up before it began: now it is done.
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    registers.gregs[REG_RIP] -= 2;
#elif defined(__aarch64__)
    registers.pc -= 4;
#else
    static_cast<void>(registers);
#endif
  }

  static inline volatile char blocked_ = 0;
  static inline volatile int seen_ = -1;
  struct sigaction before_{};
  bool works_ = false;
};

TEST_CASE("rdma: a small put neither allocates nor calls the system") {
  const fake::InUse in_use(fake::default_machine(1));
  verbs::RdmaOptions options;
  options.address = "127.0.0.1";
  const auto here = std::make_shared<verbs::RdmaTransport>(options),
             there = std::make_shared<verbs::RdmaTransport>(options);
  const auto connection = here->connect(there->bind(false), "there", patience());
  const auto memory = there->allocate(4096, Access::ReadWrite, 1, 8);
  const auto target = connection->attach(memory->remote(), patience());
  const How how;
  std::uint64_t word = 0;
  const auto put = [&](unsigned times) {
    for (unsigned i = 0; i < times; ++i) {
      ++word;
      target->write(&word, sizeof word, 8 * (i % 8), std::nullopt, how);
    }
  };
  put(1000);  // what is made on first use
  const std::uint64_t before = allocations;
  int called = -1;
  bool looked = false;
  {
    const SystemCalls calls;
    put(1000);  // with all completions that are asked for and polled in between
    called = calls.first();
    looked = calls.works();
  }
  CHECK(allocations == before);
  if (!looked) MESSAGE("this kernel does not tell of system calls");
  CHECK(called == -1);
  target->flush(patience());
  CHECK(std::memcmp(static_cast<char*>(memory->data()) + 56, &word, 8) == 0);
  {
    const SystemCalls calls;
    ::syscall(SYS_getpid);
    CHECK((!calls.works() || calls.first() == SYS_getpid));  // it would be seen
  }
}

}  // namespace
}  // namespace onesided::tests
#endif
