#include "core/work.h"

#include "tests/support.h"

namespace onesided::tests {
namespace {

// Holds operations back until it is opened.
class Gate {
 public:
  void open() {
    open_.store(true, std::memory_order_seq_cst);
    event_.notify();
  }
  // In a body: waits for the gate, or to be cancelled.
  void pass(Checkpoint& between) {
    reached_.store(true);
    for (;;) {
      between.pass();
      if (event_.await([this] { return open_.load(std::memory_order_seq_cst); }, Deadline::after(0.001))) return;
    }
  }
  // In the test: returns when a body stands before the gate.
  void await_body() {
    eventually("an operation begins", [this] { return reached_.load(); });
  }

 private:
  std::atomic<bool> open_{false}, reached_{false};
  Event event_;
};

struct Bench {
  std::shared_ptr<Strand> strand = std::make_shared<Strand>();
  Gate gate;

  std::shared_ptr<StrandWork> submit(StrandWork::Body body) { return strand->submit(std::move(body), patience()); }
  std::shared_ptr<StrandWork> block() {
    auto work = submit([this](Checkpoint& between) { gate.pass(between); });
    gate.await_body();
    return work;
  }
  ~Bench() {
    gate.open();
    strand->close(patience());
  }
};

[[noreturn]] void break_down(const char* why) {
  fail(ErrorKind::RemoteAccess, why);
}

TEST_CASE("work: the completed one is always the same and always done") {
  CHECK(Work::completed() == Work::completed());
  CHECK(Work::completed()->done());
  CHECK(raised([] { Work::completed()->wait(Deadline::after(0)); }) == "");
  CHECK_FALSE(Work::completed()->error().has_value());
}

TEST_CASE("work: a strand keeps the order, one operation at a time") {
  Bench bench;
  std::vector<unsigned> order;  // without a lock: ThreadSanitizer would see two at once
  std::vector<std::shared_ptr<StrandWork>> works;
  for (unsigned i = 0; i < 2000; ++i) works.push_back(bench.submit([&order, i](Checkpoint&) { order.push_back(i); }));
  works.back()->wait(patience());
  REQUIRE(order.size() == 2000);
  unsigned wrong = 0;
  for (unsigned i = 0; i < 2000; ++i) wrong += order[i] != i || !works[i]->done() || works[i]->error();
  CHECK(wrong == 0);
}

TEST_CASE("work: each failure is its own, and the next operation runs") {
  Bench bench;
  const auto bad = bench.submit([](Checkpoint&) { break_down("the first"); });
  const auto good = bench.submit([](Checkpoint&) {});
  const auto odd = bench.submit([](Checkpoint&) { throw std::runtime_error("the third"); });
  CHECK(raised([&] { good->wait(patience()); }) == "");
  CHECK(raised([&] { bad->wait(patience()); }) == "RemoteAccess");
  CHECK(raised([&] { bad->wait(patience()); }) == "RemoteAccess");  // told as often as asked
  CHECK(raised([&] { odd->wait(patience()); }) == "Onesided");
  CHECK(contains(odd->error()->what(), "the third"));
  CHECK(bad->error()->kind() == ErrorKind::RemoteAccess);
  CHECK_FALSE(good->error().has_value());
}

TEST_CASE("work: a deadline cancels what runs and what is queued behind it, not what is before") {
  Bench bench;
  std::atomic<unsigned> ran{0};
  const auto before = bench.submit([&](Checkpoint&) { ++ran; });
  const auto running = bench.block();
  const auto behind = bench.submit([&](Checkpoint&) { ++ran; });
  CHECK_FALSE(running->done());
  CHECK(raised([&] { running->wait(Deadline::after(0.02)); }) == "DeadlineExceeded");
  CHECK(running->done());
  CHECK(behind->done());
  CHECK(behind->error()->kind() == ErrorKind::DeadlineExceeded);
  CHECK(raised([&] { before->wait(patience()); }) == "");
  CHECK(ran == 1);
  // The strand goes on.
  bench.submit([&](Checkpoint&) { ++ran; })->wait(patience());
  CHECK(ran == 2);
}

TEST_CASE("work: a deadline cancels one that is queued with all behind it; what runs before goes on") {
  Bench bench;
  std::atomic<unsigned> ran{0};
  const auto running = bench.block();
  const auto first = bench.submit([&](Checkpoint&) { ++ran; });
  const auto second = bench.submit([&](Checkpoint&) { ran += 10; });
  const auto third = bench.submit([&](Checkpoint&) { ran += 100; });
  CHECK(raised([&] { second->wait(Deadline::after(0)); }) == "DeadlineExceeded");
  CHECK(third->done());
  CHECK_FALSE(first->done());
  CHECK_FALSE(running->done());
  bench.gate.open();
  CHECK(raised([&] { first->wait(patience()); }) == "");
  CHECK(raised([&] { running->wait(patience()); }) == "");
  CHECK(ran == 1);
  // Cancelling what is over changes nothing.
  bench.strand->cancel(first);
  CHECK(raised([&] { first->wait(Deadline::after(0)); }) == "");
}

TEST_CASE("work: a deadline is a fence: the source is not read after it") {
  constexpr std::size_t kBytes = 64 << 10, kStep = 64;
  for (unsigned round = 0; round < rounds(60); ++round) {
    Bench bench;
    std::vector<char> source(kBytes, 'o'), target(kBytes, '-');
    const auto work = bench.submit([&](Checkpoint& between) {
      for (std::size_t at = 0; at < kBytes; at += kStep) {
        between.pass();
        std::memcpy(target.data() + at, source.data() + at, kStep);
        std::this_thread::yield();
      }
    });
    const bool late = raised([&] { work->wait(Deadline::after(round * 5e-6)); }) == "DeadlineExceeded";
    std::memset(source.data(), 'n', source.size());
    if (!late) CHECK(all_are(target.data(), kBytes, 'o'));
    bench.strand->drain(patience());
    CHECK(std::find(target.begin(), target.end(), 'n') == target.end());
  }
}

TEST_CASE("work: an interrupt ends the wait, not the operation") {
  struct Pressed {};
  Bench bench;
  const auto work = bench.block();
  {
    InterruptScope scope([] { throw Pressed{}; });
    CHECK_THROWS_AS(work->wait(Deadline::never()), Pressed);
  }
  CHECK_FALSE(work->done());
  bench.gate.open();
  CHECK(raised([&] { work->wait(patience()); }) == "");
}

TEST_CASE("work: drain reports the first failure that nobody was told of, once") {
  Bench bench;
  const auto drained = [&] { return said([&] { bench.strand->drain(patience()); }); };
  CHECK(drained() == "");

  bench.submit([](Checkpoint&) { break_down("first"); });
  bench.submit([](Checkpoint&) { break_down("second"); });
  bench.submit([](Checkpoint&) {});
  CHECK_FALSE(bench.strand->idle());
  CHECK(drained() == "first");
  CHECK(bench.strand->idle());
  CHECK(drained() == "");

  // The first was told, so that the second is the one to report; by error() as well as by wait().
  const auto waited = bench.submit([](Checkpoint&) { break_down("waited for"); });
  CHECK(raised([&] { waited->wait(patience()); }) == "RemoteAccess");
  bench.submit([](Checkpoint&) { break_down("not waited for"); });
  CHECK(drained() == "not waited for");

  const auto asked = bench.submit([](Checkpoint&) { break_down("asked"); });
  const auto last = bench.submit([](Checkpoint&) { break_down("not asked"); });
  eventually("both failures", [&] { return last->done(); });
  CHECK(asked->error().has_value());
  CHECK(drained() == "not asked");

  const auto told = bench.submit([](Checkpoint&) { break_down("told"); });
  CHECK(raised([&] { told->wait(patience()); }) == "RemoteAccess");
  CHECK(drained() == "");
  CHECK(bench.strand->idle());
}

TEST_CASE("work: drain at its deadline cancels, says so once, and keeps what failed before for the next") {
  Bench bench;
  const auto failed = bench.submit([](Checkpoint&) { break_down("before"); });
  const auto running = bench.block();
  std::atomic<bool> ran{false};
  const auto queued = bench.submit([&](Checkpoint&) { ran = true; });
  CHECK(raised([&] { bench.strand->drain(Deadline::after(0.02)); }) == "DeadlineExceeded");
  CHECK(running->done());
  CHECK(queued->error()->kind() == ErrorKind::DeadlineExceeded);
  CHECK_FALSE(ran);
  CHECK(said([&] { bench.strand->drain(patience()); }) == "before");
  CHECK(said([&] { bench.strand->drain(patience()); }) == "");
  CHECK(bench.strand->idle());
  CHECK(failed->error().has_value());
}

TEST_CASE("work: drain leaves alone what is issued meanwhile") {
  Bench bench;
  std::atomic<bool> stop{false};
  // Each operation issues the next, so that the strand is never empty.
  std::function<void(Checkpoint&)> again = [&](Checkpoint&) {
    if (!stop) bench.submit(again);
  };
  const auto first = bench.submit(again);
  CHECK(raised([&] { bench.strand->drain(patience()); }) == "");
  CHECK(first->done());
  CHECK_FALSE(bench.strand->idle());
  stop = true;

  // At the deadline, too. `later` is issued by the interrupt check, in the middle of the drain.
  static Bench* issuer = nullptr;
  static std::shared_ptr<StrandWork> later = nullptr;
  Bench other;
  issuer = &other;
  const auto running = other.block();
  const auto earlier = other.submit([](Checkpoint&) {});
  {
    InterruptScope scope([] {
      if (later == nullptr) later = issuer->submit([](Checkpoint&) { break_down("later"); });
    });
    CHECK(raised([&] { other.strand->drain(Deadline::after(0.2)); }) == "DeadlineExceeded");
  }
  CHECK(running->error()->kind() == ErrorKind::DeadlineExceeded);
  CHECK(earlier->error()->kind() == ErrorKind::DeadlineExceeded);
  REQUIRE(later != nullptr);
  CHECK(said([&] { later->wait(patience()); }) == "later");
  later = nullptr;
}

TEST_CASE("work: who was told of a failure is not told again by what is issued then") {
  Bench bench;
  unsigned told_twice = 0;
  for (unsigned round = 0; round < rounds(2000); ++round) {
    raised([&, bad = bench.submit([](Checkpoint&) { break_down("bad"); })] { bad->wait(patience()); });
    const std::uint64_t told = bench.strand->failures_told();
    bench.submit([](Checkpoint&) {})->wait(patience());
    told_twice += bench.strand->failed_beyond(told).has_value();
    bench.strand->drain(patience());
  }
  CHECK(told_twice == 0);
}

TEST_CASE("work: who issues too much is held back, up to a deadline") {
  Bench bench;
  bench.block();
  std::atomic<unsigned> ran{0};
  for (std::size_t i = 0; i < Strand::kMostQueued; ++i) bench.submit([&](Checkpoint&) { ++ran; });
  CHECK(raised([&] { bench.strand->submit([](Checkpoint&) {}, Deadline::after(0.02)); }) == "DeadlineExceeded");
  std::jthread issuer([&] {
    for (unsigned i = 0; i < 100; ++i) bench.submit([&](Checkpoint&) { ++ran; });
  });
  bench.gate.open();
  issuer.join();
  bench.strand->drain(patience());
  CHECK(ran == Strand::kMostQueued + 100);
}

TEST_CASE("work: 100,000 operations from several threads all run, each once") {
  Bench bench;
  const unsigned n = kUnderTsan ? 20000 : 100000;
  std::vector<unsigned char> ran(n);
  side_by_side(4, [&](unsigned thread) {
    for (unsigned i = thread; i < n; i += 4) bench.submit([&ran, i](Checkpoint&) { ++ran[i]; });
  });
  bench.strand->drain(patience());
  CHECK(std::count(ran.begin(), ran.end(), 1) == n);
  CHECK(bench.strand->idle());
}

TEST_CASE("work: close ends what is pending; waiters learn of it") {
  const auto strand = std::make_shared<Strand>();
  Gate gate;
  const auto running = strand->submit([&](Checkpoint& between) { gate.pass(between); }, patience());
  gate.await_body();
  const auto queued = strand->submit([](Checkpoint&) {}, patience());
  std::string outcome;
  std::jthread waiter([&] { outcome = raised([&] { queued->wait(patience()); }); });
  CHECK_FALSE(strand->close(Deadline::after(0.02)));
  waiter.join();
  CHECK(outcome == "DeadlineExceeded");
  CHECK(running->done());
  CHECK(strand->idle());
  CHECK(strand->close(Deadline::after(0)));
  CHECK(raised([&] { strand->submit([](Checkpoint&) {}, patience()); }) == "StaleHandle");
}

TEST_CASE("work: what a body holds lives until the operation is over, and no longer") {
  Bench bench;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = held;
  const auto gone = [&](const char* when) { eventually(when, [&] { return alive.expired(); }); };

  auto work = bench.submit([&bench, held = std::move(held)](Checkpoint& between) { bench.gate.pass(between); });
  bench.gate.await_body();
  CHECK_FALSE(alive.expired());
  bench.gate.open();
  work->wait(patience());
  gone("the captures of one that ran are let go, although its Work is kept");

  for (const bool fails : {false, true}) {
    Bench other;
    other.block();
    auto again = std::make_shared<int>(2);
    const std::weak_ptr<int> weak = again;
    auto queued = other.submit([again = std::move(again)](Checkpoint&) {});
    CHECK_FALSE(weak.expired());
    if (fails) {
      CHECK(raised([&] { queued->wait(Deadline::after(0)); }) == "DeadlineExceeded");
      CHECK(weak.expired());
    } else {
      queued = nullptr;  // nobody waits for it, and it runs all the same
      CHECK_FALSE(weak.expired());
      other.gate.open();
      eventually("the captures are let go", [&] { return weak.expired(); });
    }
  }
}

TEST_CASE("work: the body is destroyed after the operation has ended, so it may own the strand's owner") {
  struct Owner {
    std::shared_ptr<Strand> strand = std::make_shared<Strand>();
    std::atomic<bool>& destroyed;
    explicit Owner(std::atomic<bool>& flag) : destroyed(flag) {}
    ~Owner() {
      strand->close(Deadline::after(5));
      destroyed = true;
    }
  };
  std::atomic<bool> destroyed{false};
  const Stopwatch watch;
  auto owner = std::make_shared<Owner>(destroyed);
  Gate gate;
  std::shared_ptr<StrandWork> work =
      owner->strand->submit([owner, &gate](Checkpoint& between) { gate.pass(between); }, patience());
  owner = nullptr;
  CHECK_FALSE(destroyed);
  gate.open();
  work->wait(patience());
  eventually("the owner is destroyed on the pool's thread", [&] { return destroyed.load(); });
  CHECK(watch.seconds() < 5);
}

TEST_CASE("work: strands go on side by side, and a long queue does not hold up another") {
  Bench slow, quick;
  slow.block();
  for (unsigned i = 0; i < 100; ++i) quick.submit([](Checkpoint&) {})->wait(patience());
  // More strands than threads of the pool, all of them busy.
  std::vector<std::shared_ptr<Strand>> strands;
  std::atomic<unsigned> ran{0};
  for (unsigned i = 0; i < 20; ++i) {
    strands.push_back(std::make_shared<Strand>());
    for (unsigned k = 0; k < 50; ++k) strands.back()->submit([&](Checkpoint&) { ++ran; }, patience());
  }
  for (const auto& strand : strands) strand->drain(patience());
  CHECK(ran == 1000);
}

TEST_CASE("work: waits, cancels, drains and submissions of many threads at once") {
  for (unsigned round = 0; round < rounds(40); ++round) {
    Bench bench;
    std::atomic<unsigned> ran{0}, succeeded{0}, cancelled{0};
    side_by_side(4, [&](unsigned thread) {
      for (unsigned i = 0; i < 50; ++i) {
        const auto work = bench.submit([&](Checkpoint& between) {
          between.pass();
          ++ran;
        });
        const std::string outcome =
            raised([&] { work->wait(thread == 0 && i % 5 == 0 ? Deadline::after(0) : patience()); });
        outcome.empty() ? ++succeeded : ++cancelled;
        if (i % 16 == thread) raised([&] { bench.strand->drain(patience()); });
      }
    });
    CHECK(ran == succeeded);
    CHECK(succeeded + cancelled == 200);
    raised([&] { bench.strand->drain(patience()); });
    CHECK(bench.strand->idle());
  }
}

}  // namespace
}  // namespace onesided::tests
