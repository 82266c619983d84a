#include "core/window.h"

#include "core/bench.h"
#include "tests/support.h"

namespace onesided::tests {
namespace {

// A window over ranks that are transports of this process; rank i's own target is a loop back.
struct Group {
  std::vector<std::shared_ptr<shm::ShmTransport>> transports;
  std::vector<std::vector<std::shared_ptr<Connection>>> connections;
  std::vector<std::unique_ptr<Window>> windows;

  explicit Group(unsigned size, std::uint64_t nbytes = 4096, std::uint32_t signals = 8) {
    std::vector<std::shared_ptr<Memory>> memories;
    for (unsigned i = 0; i < size; ++i) {
      transports.push_back(std::make_shared<shm::ShmTransport>());
      memories.push_back(transports[i]->allocate(nbytes, Access::ReadWrite, signals, size + 1));
    }
    connections.resize(size);
    for (unsigned i = 0; i < size; ++i) {
      std::vector<std::shared_ptr<Target>> targets;
      for (unsigned k = 0; k < size; ++k) {
        const std::string name = "rank " + std::to_string(k);
        connections[i].push_back(transports[i]->connect(transports[k]->bind(false), name, patience()));
        targets.push_back(i == k ? transports[i]->loop_back(memories[i], name)
                                 : connections[i][k]->attach(memories[k]->remote(), patience()));
      }
      windows.push_back(std::make_unique<Window>("group", memories[i], std::move(targets), i));
    }
  }
  ~Group() {
    for (auto& transport : transports) transport->close(patience());
  }
  Window& operator[](unsigned rank) { return *windows[rank]; }
  void signal(unsigned from, unsigned to, std::uint32_t index, std::uint64_t add = 1) {
    windows[from]->target("signal", to).signal(Signal{index, add}, How{});
  }
};

std::uint64_t consume(Window& window, std::uint32_t index, const Deadline& deadline = patience()) {
  return window.wait_signal(index, std::nullopt, std::nullopt, deadline, kSpin);
}

std::uint64_t await(Window& window, std::uint32_t index, std::uint64_t at_least, const Deadline& deadline = patience(),
                    std::optional<std::int64_t> source = {}) {
  return window.wait_signal(index, at_least, source, deadline, kSpin);
}

Deadline soon() {
  return Deadline::after(0.01);
}

TEST_CASE("window: ranks, signals and counts") {
  Group group(3);
  CHECK(group[1].size() == 3);
  CHECK(group[1].rank() == 1u);
  for (const std::int64_t rank : {std::int64_t{3}, std::int64_t{-1}, INT64_MAX, INT64_MIN}) {
    CHECK(raised([&] { group[0].target("put", rank); }) == "Bounds");
    CHECK(raised([&] { await(group[0], 0, 0, soon(), rank); }) == "Bounds");
  }
  for (unsigned from = 0; from < 3; ++from) group.signal(from, 1, 2, from + 1);
  CHECK(await(group[1], 2, 6) == 6);
  CHECK(group[1].signal_value(2) == 6);
  CHECK(group[1].signal_value(0) == 0);
  CHECK(raised([&] { group[1].signal_value(8); }) == "Bounds");
  CHECK(raised([&] { await(group[1], 8, 0, soon()); }) == "Bounds");
  CHECK(raised([&] { consume(group[1], UINT32_MAX, soon()); }) == "Bounds");
  CHECK(await(group[1], 7, 0) == 0);
  CHECK(raised([&] { await(group[1], 2, 7, soon()); }) == "DeadlineExceeded");
  const std::string message = said([&] { await(group[1], 2, 7, soon()); });
  CHECK(contains(message, "stands at 6"));
  CHECK(contains(message, "waited for 7"));
}

TEST_CASE("window: the ring of puts with signals, over and over") {
  constexpr unsigned kRanks = 3, kWords = 100;
  Group group(kRanks, kWords * 8);
  const unsigned n = rounds(300);
  std::atomic<unsigned> stale{0};
  side_by_side(kRanks, [&](unsigned me) {
    std::vector<std::uint64_t> words(kWords);
    const unsigned next = (me + 1) % kRanks, before = (me + kRanks - 1) % kRanks;
    std::vector<std::uint64_t> got(kWords);
    for (unsigned round = 1; round <= n; ++round) {
      std::fill(words.begin(), words.end(), round * 10 + me);
      group[me].target("put", next).write(words.data(), kWords * 8, 0, Signal{0, 1}, How{});
      await(group[me], 0, round, patience(), before);
      std::memcpy(got.data(), group[me].memory()->data(), kWords * 8);
      for (unsigned i = kWords; i-- > 0;) stale += got[i] != round * 10 + before;
      group.signal(me, before, 1);  // it may be overwritten
      consume(group[me], 1);
    }
  });
  CHECK(stale == 0);
}

TEST_CASE("window: a wait without a count consumes one") {
  Group group(2);
  CHECK(raised([&] { consume(group[0], 0, soon()); }) == "DeadlineExceeded");
  group.signal(1, 0, 0, 3);
  for (unsigned i = 0; i < 3; ++i) CHECK(consume(group[0], 0, Deadline::after(0)) == 3);
  for (unsigned i = 0; i < 3; ++i) CHECK(raised([&] { consume(group[0], 0, soon()); }) == "DeadlineExceeded");
  group.signal(1, 0, 0);
  CHECK(consume(group[0], 0) == 4);
  CHECK(raised([&] { consume(group[0], 1, soon()); }) == "DeadlineExceeded");  // each index for itself
  group.signal(0, 0, 1);
  CHECK(consume(group[0], 1) == 1);
  // A wait for a count consumes nothing.
  group.signal(1, 0, 2, 2);
  CHECK(await(group[0], 2, 2) == 2);
  CHECK(consume(group[0], 2) == 2);
  CHECK(consume(group[0], 2) == 2);
}

TEST_CASE("window: of several consumers each signal goes to one") {
  Group group(2);
  const unsigned n = rounds(1000);
  std::atomic<unsigned> consumed{0};
  std::jthread signalling([&] {
    for (unsigned i = 0; i < 3 * n; ++i) group.signal(1, 0, 0);
  });
  side_by_side(3, [&](unsigned) {
    for (unsigned i = 0; i < n; ++i) {
      consume(group[0], 0);
      ++consumed;
    }
  });
  signalling.join();
  CHECK(consumed == 3 * n);
  CHECK(raised([&] { consume(group[0], 0, soon()); }) == "DeadlineExceeded");
}

TEST_CASE("window: a consumer that gives up leaves its signal to another that waits already") {
  Group group(2);
  std::atomic<bool> consumed{false};
  std::string outcome;
  // The first wait is under way when the second begins; then the first ends without a signal.
  std::jthread impatient([&] { outcome = raised([&] { consume(group[0], 0, Deadline::after(0.05)); }); });
  const auto waits = counters_for("window", "group");
  const std::uint64_t before = waits->get(Count::Waits);
  std::jthread patient([&] {
    consume(group[0], 0);
    consumed = true;
  });
  impatient.join();
  CHECK(outcome == "DeadlineExceeded");
  eventually("the second waits", [&] { return waits->get(Count::Waits) > before || consumed; });
  CHECK_FALSE(consumed);
  group.signal(1, 0, 0);
  const bool in_time = happens([&] { return consumed.load(); }, 5);
  if (!in_time) group.signal(1, 0, 0);
  patient.join();
  CHECK(in_time);
}

TEST_CASE("window: counts near 2^32 and 2^64") {
  Group group(2);
  constexpr std::uint64_t top = UINT64_MAX;
  for (const auto& [index, start] : {std::pair<std::uint32_t, std::uint64_t>{0, UINT32_MAX - 1}, {1, top - 1}}) {
    group.signal(1, 0, index, start);
    CHECK(await(group[0], index, start) == start);
    CHECK(raised([&, index = index, start = start] { await(group[0], index, start + 1, soon()); }) ==
          "DeadlineExceeded");
    for (std::uint64_t step = 1; step <= 4; ++step) {
      std::jthread later([&, index = index] { group.signal(1, 0, index); });
      CHECK(await(group[0], index, start + step) == start + step);
      later.join();
      CHECK(raised([&, index = index, start = start] { await(group[0], index, start + step + 1, soon()); }) ==
            "DeadlineExceeded");
    }
  }
  CHECK(group[0].signal_value(1) == 2);
}

TEST_CASE("window: flush_all goes only to who was used, and reports the first failure after all") {
  Group group(3);
  const auto flushes = [&](unsigned rank) { return group[0].target("", rank).counters().get(Count::Flushes); };
  const std::uint64_t base[] = {flushes(0), flushes(1), flushes(2)};
  group[0].flush_all(patience());
  group[0].target("put", 1).write("x", 1, 0, {}, How{});
  group[0].flush_all(patience());
  group[0].flush_all(patience());
  CHECK(flushes(0) == base[0]);
  CHECK(flushes(1) == base[1] + 1);
  CHECK(flushes(2) == base[2]);

  group[0].target("put", 1).write("x", 1, 0, {}, How{});
  group[0].target("put", 2).write("x", 1, 0, {}, How{});
  group.transports[1]->close(patience());
  eventually("rank 1 is lost", [&] { return group[0].target("", 1).peer().lost(); });
  CHECK(raised([&] { group[0].flush_all(patience()); }) == "ConnectionLost");
  CHECK(flushes(2) == base[2] + 1);

  // Told every time, until it is acknowledged; who flushes that rank alone is told in any case.
  CHECK(raised([&] { group[0].flush_all(patience()); }) == "ConnectionLost");
  for (unsigned i = 0; i < 2; ++i) {
    CHECK(raised([&] { group[0].target("flush", 1).flush(patience()); }) == "ConnectionLost");
  }
  group[0].target("put", 2).write("x", 1, 0, {}, How{});
  group.transports[2]->close(patience());
  eventually("rank 2 is lost", [&] { return group[0].target("", 2).peer().lost(); });
  group[0].acknowledge_lost();
  CHECK(raised([&] { group[0].flush_all(patience()); }) == "");
}

TEST_CASE("window: close waits for asynchronous operations until its deadline, and closes everything in any case") {
  constexpr std::uint64_t kBytes = 16 << 20;
  How how;
  how.async = true;
  const std::vector<char> source(kBytes, 's');
  for (const bool in_time : {true, false}) {
    Group group(2, kBytes);
    std::vector<std::shared_ptr<Work>> works;
    for (unsigned i = 0; i < (in_time ? 10 : 100); ++i) {
      works.push_back(group[0].target("put", i % 2).write(source.data(), kBytes, 0, {}, how));
    }
    const auto close = [&] { group[0].close(in_time ? Deadline::never() : Deadline::after(0)); };
    CHECK(raised(close) == (in_time ? "" : "DeadlineExceeded"));
    CHECK(group[0].closed());
    CHECK(group[0].memory()->closed());
    for (const std::int64_t rank : {0, 1}) {
      CHECK(raised([&] { group[0].target("put", rank).write("x", 1, 0, {}, How{}); }) == "StaleHandle");
      CHECK(raised([&] { group[0].target("put", rank).write("x", 1, 0, {}, how); }) == "StaleHandle");
    }
    for (const auto& work : works) CHECK(work->done());
    CHECK(works.back()->error().has_value() == !in_time);
    CHECK(raised(close) == "");
  }
}

TEST_CASE("window: lost ranks end waits for anybody until they are acknowledged, and waits for them always") {
  Group group(3);
  CHECK(group[0].lost().empty());
  CHECK(group[0].acknowledge_lost().empty());
  std::vector<std::string> outcomes(3);
  std::atomic<unsigned> began{0};
  std::jthread waiting([&] {
    side_by_side(3, [&](unsigned i) {
      ++began;
      const std::optional<std::int64_t> source = i == 0 ? std::nullopt : std::optional<std::int64_t>(i);
      outcomes[i] = raised([&] { await(group[0], i, 1, patience(), source); });
    });
  });
  eventually("they wait", [&] { return began == 3; });
  group.transports[1]->close(patience());
  eventually("rank 1 is lost", [&] { return group[0].lost() == std::vector<unsigned>{1}; });
  group.signal(2, 0, 2);
  waiting.join();
  CHECK(outcomes == std::vector<std::string>{"ConnectionLost", "ConnectionLost", ""});
  CHECK(contains(said([&] { await(group[0], 0, 1); }), "rank 1"));
  CHECK(raised([&] { consume(group[0], 0); }) == "ConnectionLost");
  group.signal(2, 0, 0);
  CHECK(await(group[0], 0, 1) == 1);  // what has come has come
  CHECK(consume(group[0], 0) == 1);   // the wait that failed consumed nothing

  CHECK(group[0].acknowledge_lost() == std::vector<unsigned>{1});
  CHECK(raised([&] { await(group[0], 0, 2, soon()); }) == "DeadlineExceeded");
  CHECK(raised([&] { await(group[0], 0, 2, soon(), 1); }) == "ConnectionLost");
  group.transports[2]->close(patience());
  eventually("rank 2 is lost", [&] { return group[0].lost().size() == 2; });
  CHECK(raised([&] { await(group[0], 0, 2); }) == "ConnectionLost");
  CHECK(group[0].acknowledge_lost() == std::vector<unsigned>{1, 2});
}

TEST_CASE("window: closing ends waits, operations and flushes with StaleHandle") {
  Group group(2);
  std::vector<std::string> outcomes(2);
  std::atomic<unsigned> began{0};
  std::jthread waiting([&] {
    side_by_side(2, [&](unsigned i) {
      ++began;
      outcomes[i] = raised([&] { i == 0 ? await(group[0], 0, 1) : consume(group[0], 0); });
    });
  });
  eventually("they wait", [&] { return began == 2; });
  group[0].close(patience());
  waiting.join();
  CHECK(outcomes == std::vector<std::string>{"StaleHandle", "StaleHandle"});
  CHECK(group[0].closed());
  CHECK(raised([&] { group[0].target("put", 1).write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { group[0].target("put", 0).write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { group[0].flush_all(patience()); }) == "StaleHandle");
  CHECK(raised([&] { group[1].target("put", 0).write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { await(group[0], 0, 1, soon()); }) == "StaleHandle");
  CHECK(raised([&] { group[1].target("put", 1).write("x", 1, 0, {}, How{}); }) == "");  // its own is open
  group[0].close(patience());
}

TEST_CASE("window: an attached one has no memory of its own") {
  Group group(2);
  Window attached("attached", nullptr, {group.connections[1][0]->attach(group[0].memory()->remote(), patience())},
                  std::nullopt);
  attached.target("put", 0).write("x", 1, 0, Signal{0, 1}, How{});
  CHECK(consume(group[0], 0) == 1);
  CHECK(raised([&] { consume(attached, 0); }) == "Unsupported");
  CHECK(raised([&] { attached.signal_value(0); }) == "Unsupported");
  CHECK(raised([&] { bench_put_latency(attached, 0, "12345678", 8, How{}, 1, true, true); }) == "Unsupported");
  CHECK(raised([] { Window("half", nullptr, {nullptr}, std::nullopt); }) == "Onesided");
  attached.flush_all(patience());
  attached.close(patience());
  CHECK(raised([&] { attached.target("put", 0).write("x", 1, 0, {}, How{}); }) == "StaleHandle");
  CHECK(raised([&] { group[1].target("put", 0).write("x", 1, 0, {}, How{}); }) ==
        "");  // another window of the same memory
}

}  // namespace
}  // namespace onesided::tests
